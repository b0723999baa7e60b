"""`refspec`, and `python -m refspec`.

Loading the commands takes tenths of a second, and Ctrl-C may come in them. So nothing of that is imported up here, and
what imports it is ready for Ctrl-C.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` looks into the current folder first, which may hold a learner's files: a psutil.py there is none of
    # ours. What Python needs to get here it has looked for there already; `python -P -m refspec` or `refspec` do not.
    del sys.path[0]

BUSY = 0.25  # programs at work for each core, over the last minute


def main(prog_name: str | None = None) -> None:
    """Run the command line in sys.argv, which usage lines call `prog_name` (None: sys.argv[0]). Ends in SystemExit."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed (`<&-`): else the next file opened would take its place
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
    wait_politely_where_others_work()
    try:
        interpret_kernels_where_no_gpu_is()
        from refspec.cli.main import app

        app(prog_name=prog_name)
    except KeyboardInterrupt:
        print("refspec: interrupted", file=sys.stderr)
        sys.exit(130)


def wait_politely_where_others_work() -> None:
    """On a busy machine, have torch's threads sleep while they wait for one another, unless the user has a say in it.

    By default they spin, which on an idle machine makes decoding here a fifth faster. Where another program holds a
    core, one thread spins while the thread that it waits for cannot run: with one such program on two cores, the demo
    then takes 157 seconds, and 13 with a short spin. Read by torch's OpenMP when it is loaded.
    """
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY * (os.cpu_count() or 1):
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def interpret_kernels_where_no_gpu_is() -> None:
    """Where the driver shows no GPU, have Triton interpret its kernels, unless the user has a say in it.

    Triton decides when it is imported, and torch, which could tell as well, takes a second to load.
    """
    if "TRITON_INTERPRET" not in os.environ and not gpu_is_there():
        os.environ["TRITON_INTERPRET"] = "1"


def gpu_is_there() -> bool:
    """Does NVIDIA's driver, if there is one, show this process a GPU?"""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


if __name__ == "__main__":
    main("python -m refspec")
