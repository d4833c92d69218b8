"""An embedded function platform that AWS Lambda's clients and Lambda's own runtime can use.

Real boto3 talks to it, and each instance is a process with the real `awslambdaric` in it.
"""

from headgate.lambda_emulator.auth import client_options
from headgate.lambda_emulator.billing import BillingLog, BillingRecord, gb_s, read_bill
from headgate.lambda_emulator.platform import EmbeddedPlatform, InstanceSnapshot, LambdaPlatform
from headgate.lambda_emulator.settings import PlatformSettings

__all__ = [
    "BillingLog",
    "BillingRecord",
    "EmbeddedPlatform",
    "InstanceSnapshot",
    "LambdaPlatform",
    "PlatformSettings",
    "client_options",
    "gb_s",
    "read_bill",
]
