"""An embedded function platform that AWS Lambda's clients and Lambda's own runtime can use.

Real boto3 talks to it, and each instance is a process with the real `awslambdaric` in it.
"""

from headgate.serverless.bill import Bill, BillingRecord, gb_s, read_bill
from headgate.serverless.embedded import EmbeddedPlatform
from headgate.serverless.keys import client_options
from headgate.serverless.platform import InstanceState, Platform
from headgate.serverless.settings import Settings

__all__ = [
    "Bill",
    "BillingRecord",
    "EmbeddedPlatform",
    "InstanceState",
    "Platform",
    "Settings",
    "client_options",
    "gb_s",
    "read_bill",
]
