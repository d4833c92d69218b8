"""Deploys an application as a function: packages it, test-imports it, creates the function."""

from headgate.deploy.lambda_function import LambdaFunction, connect, deploy
from headgate.deploy.package import Package, pack, try_import

__all__ = ["LambdaFunction", "Package", "connect", "deploy", "pack", "try_import"]
