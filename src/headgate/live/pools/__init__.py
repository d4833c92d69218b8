"""Remote pools, run by a provider: AWS Lambda functions and SageMaker endpoints."""
