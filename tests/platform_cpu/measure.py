# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Run a command and say what it took: seconds until lines appear, and peak memory over all its processes.

python tests/platform_cpu/measure.py --mark 'step:1 ' --mark 'step:2 ' -- COMMAND...
"""

import argparse
import os
import re
import subprocess
import sys
import threading
import time

import psutil


class Watcher(threading.Thread):
    """Samples a process tree until stopped.

    Attributes:
        peak_pss: Largest sum of proportional set sizes seen, in bytes: pages shared by k processes count 1/k in each.
        peak_count: Number of processes at that moment.
        cpu_s: Seconds of CPU used by each process seen, by process id.
    """

    def __init__(self, root: psutil.Process, interval_s: float):
        super().__init__(daemon=True)
        self.peak_pss = 0
        self.peak_count = 0
        self.cpu_s: dict[int, float] = {}
        self._root = root
        self._interval_s = interval_s
        self._stop_event = threading.Event()

    def run(self) -> None:
        """Sample."""
        while not self._stop_event.wait(self._interval_s):
            self._sample()

    def stop(self) -> None:
        """Take no more samples."""
        self._stop_event.set()
        self.join()

    def _sample(self) -> None:
        total = count = 0
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                total += process.memory_full_info().pss
                times = process.cpu_times()
            except psutil.Error:
                continue
            self.cpu_s[process.pid] = times.user + times.system
            count += 1
        if total > self.peak_pss:
            self.peak_pss, self.peak_count = total, count


def main() -> int:
    """Run the command given after `--`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mark", action="append", default=[], help="regular expression; its first match is timed")
    parser.add_argument("--interval-s", type=float, default=1.0)
    parser.add_argument("--timeline", action="store_true", help="prefix each output line with its second")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    watcher = Watcher(psutil.Process(process.pid), args.interval_s)
    watcher.start()
    found: dict[str, float] = {}
    assert process.stdout is not None
    for line in process.stdout:
        elapsed = time.monotonic() - start
        sys.stdout.write(f"{elapsed:7.1f} {line}" if args.timeline else line)
        sys.stdout.flush()
        for mark in args.mark:
            if mark not in found and re.search(mark, line):
                found[mark] = elapsed
    code = process.wait()
    watcher.stop()
    for mark, elapsed in found.items():
        print(f"measured: {mark!r} after {elapsed:.1f} s")
    total_s = time.monotonic() - start
    gib = watcher.peak_pss / 2**30
    print(f"measured: end after {total_s:.1f} s, {sum(watcher.cpu_s.values()):.0f} s of CPU")
    print(f"measured: peak {gib:.2f} GiB over {watcher.peak_count} processes")
    print(f"measured: load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
