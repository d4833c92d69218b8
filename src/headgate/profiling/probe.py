"""`python -m headgate.profiling.probe`: the process that a function is measured in.

It reads a `ProbeTask` from its input, starts the function as an instance of a platform would, and
then measures whatever it is asked to. Its first line looks at the clock, and what it imports
before that is part of the start of the process: so everything else is imported later.
"""

from time import monotonic_ns

READY_NS = monotonic_ns()

import os  # noqa: E402


def main() -> None:
    """Do as told until the input ends."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a model prints must not come between our lines
    wishes = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor may it read them

    import msgspec  # noqa: PLC0415  see above

    from headgate.profiling.probe_client import (  # noqa: PLC0415  see above
        MeasureRequest,
        ProbeAnswer,
        ProbeTask,
    )

    task = msgspec.json.decode(wishes.readline(), type=ProbeTask)
    os.sched_setaffinity(0, task.cores)
    answer = ProbeAnswer()
    try:
        from headgate.profiling.measure import ProbedFunction  # noqa: PLC0415

        subject = ProbedFunction(task, READY_NS)
        answer.started = subject.started
        answer.peak_bytes = peak_bytes()
        output.write(msgspec.json.encode(answer) + b"\n")
        for line in wishes:
            found = subject.measure(msgspec.json.decode(line, type=MeasureRequest))
            answer = ProbeAnswer(found=found, peak_bytes=peak_bytes())
            output.write(msgspec.json.encode(answer) + b"\n")
    except BaseException as error:  # whatever a model does
        from headgate.functions.error_text import error_text  # noqa: PLC0415

        said = str(error) if type(error).__name__ == "ConfigError" else error_text(error)
        output.write(msgspec.json.encode(ProbeAnswer(error=said)) + b"\n")
    # Not by the usual way out: a model may have left threads behind that never end.
    os._exit(0)


def peak_bytes() -> int:
    """Return the most memory that this process ever held.

    `getrusage` would also count what its parent held when it was started.
    """
    with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123  no pathlib yet
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
