"""Slurm on this machine alone: a controller, one node and their authentication, in a directory of their own."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
POLL_S, POLLS = 0.1, 3000
"""Deadlines are counted in polls: a machine may sleep in between."""

CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
KillWait=60
FirstJobId={first_job}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """The reason why Slurm cannot be started here, "" if there is none."""
    missing = [name for name in NEEDED if shutil.which(name, path=_path()) is None]
    if missing:
        return f"there is no {', '.join(missing)}: on Debian, apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def _path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


def _free_ports(number: int) -> list[int]:
    """Ports that nobody listens at; Slurm takes no port 0."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [server.getsockname()[1] for server in taken]
    for server in taken:
        server.close()
    return ports


class Slurm:
    """One node that runs jobs; use it in a `with`, which ends its jobs and its daemons.

    Args:
        directory: an empty one for configuration, state and logs.
        environment: variables of the jobs beside those of this process.
    """

    def __init__(self, directory: Path, *, environment: dict[str, str]) -> None:
        self._directory = directory
        self._daemons: list[subprocess.Popen] = []
        self._environment = {
            **os.environ,
            **environment,
            "PATH": f"{environment.get('PATH', '')}:{_path()}",
            "SLURM_CONF": str(directory / "slurm.conf"),
        }

    def __enter__(self) -> "Slurm":
        host = socket.gethostname().partition(".")[0]
        controller_port, node_port = _free_ports(2)
        (self._directory / "state").mkdir()
        (self._directory / "spool").mkdir()
        (self._directory / "slurm.conf").write_text(
            CONFIG.format(
                host=host,
                directory=self._directory,
                controller_port=controller_port,
                node_port=node_port,
                first_job=1 + os.getpid() % 10_000,
                cpus=os.cpu_count(),
            )
        )
        key = self._directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = {"key": "key-file", "socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}
        self._start("munged", "-F", "--force", *(f"--{flag}={key.with_suffix('.' + n)}" for n, flag in names.items()))
        self._until(key.with_suffix(".socket").exists, what="munged listens")
        try:
            self._start("slurmctld", "-D")
            self._until(lambda: "UP" in self.call("scontrol", "ping", check=False), what="slurmctld answers")
            self._start("slurmd", "-D")
            node = ("scontrol", "show", "node", host)
            self._until(lambda: "State=IDLE " in self.call(*node, check=False), what="the node is idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) == 3:
            for job in self.call("squeue", "--noheader", "--format=%i", check=False).split():
                self.call("scancel", job, check=False)
                self.call("scancel", "--signal=KILL", "--full", job, check=False)
            self._until(lambda: not self.call("squeue", "--noheader", check=False), what="all jobs have ended")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()

    def call(self, *words: str, check: bool = True) -> str:
        """Returns what a command of Slurm prints."""
        done = subprocess.run(words, env=self._environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 or not check, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, *words: str, cwd: Path, log: Path) -> str:
        """Submits a job, and returns its number."""
        done = self.call("sbatch", "--parsable", f"--chdir={cwd}", f"--output={log}", *words)
        return done.strip().splitlines()[-1]

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING, and its exit code, such as 2:0."""
        shown = self.call("scontrol", "show", "job", job)
        found = dict(re.findall(r"(JobState|ExitCode)=(\S+)", shown))
        return f"{found['JobState']} {found['ExitCode']}"

    def wait(self, job: str, *, log: Path) -> str:
        """Returns the last state of a job, when it has one."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self._until(lambda: self.state(job).startswith(over), what=f"job {job} has ended", log=log)
        return self.state(job)

    def until(self, condition, *, what: str, log: Path) -> None:
        """Waits for something that a job does."""
        self._until(condition, what=what, log=log)

    def _start(self, *words: str) -> None:
        with (self._directory / f"{words[0]}.out").open("w") as log:
            self._daemons.append(subprocess.Popen(words, env=self._environment, stdout=log, stderr=log))

    def _until(self, condition, *, what: str, log: Path | None = None) -> None:
        for _ in range(POLLS):
            if condition():
                return
            time.sleep(POLL_S)
        logs: Sequence[Path] = [*self._directory.glob("*.out"), *([log] if log and log.exists() else [])]
        raise AssertionError(f"not in time: {what}\n" + "\n".join(f"{p}:\n{p.read_text()[-3000:]}" for p in logs))
