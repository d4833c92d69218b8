"""A local emulator of AWS Lambda.

Clients use boto3 unchanged, and each function instance is a process that runs `awslambdaric`, the
runtime of AWS.
"""

from headgate.lambda_emulator.auth import client_options
from headgate.lambda_emulator.invoker import BillingLog, BillingRecord, gb_s, read_billing_log
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
    "read_billing_log",
]
