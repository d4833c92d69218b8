"""Pools that somebody else runs: functions of AWS Lambda, endpoints of SageMaker."""
