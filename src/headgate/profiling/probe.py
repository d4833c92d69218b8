"""`python -m headgate.profiling.probe CORE...`: the process in which a function is measured.

The probe reads a `ProbeTask` from standard input, loads the function as a platform instance would,
and then serves one `MeasureRequest` per line. Its first statement reads the clock. Imports before
that would count as process start time, so everything else is imported later.
"""

from time import monotonic_ns

READY_NS = monotonic_ns()

import os  # noqa: E402
import sys  # noqa: E402


def main() -> None:
    """Serve requests until the input ends."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of a model must not mix with replies
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a model must not read requests
    # Before any import: libraries start threads when they are imported, which inherit the cores.
    os.sched_setaffinity(0, map(int, sys.argv[1:]))

    import msgspec  # noqa: PLC0415  see above

    from headgate.functions.measure import MeasureRequest  # noqa: PLC0415
    from headgate.profiling.probe_client import ProbeReply, ProbeTask  # noqa: PLC0415
    from headgate.system.process import memory_bytes  # noqa: PLC0415

    task = msgspec.json.decode(requests.readline(), type=ProbeTask)
    reply = ProbeReply()
    try:
        from headgate.profiling.probed_function import ProbedFunction  # noqa: PLC0415

        function = ProbedFunction(task, READY_NS)
        reply.started = function.started
        reply.peak_bytes = memory_bytes(None, "VmHWM")
        output.write(msgspec.json.encode(reply) + b"\n")
        for line in requests:
            measurement = function.measure(msgspec.json.decode(line, type=MeasureRequest))
            reply = ProbeReply(measurement=measurement, peak_bytes=memory_bytes(None, "VmHWM"))
            output.write(msgspec.json.encode(reply) + b"\n")
    except BaseException as error:  # anything that a model raises
        from headgate.core.errors import error_text  # noqa: PLC0415

        message = str(error) if type(error).__name__ == "ConfigError" else error_text(error)
        output.write(msgspec.json.encode(ProbeReply(error=message)) + b"\n")
    # Skip the regular interpreter exit: a model may have started threads that never end.
    os._exit(0)


if __name__ == "__main__":
    main()
