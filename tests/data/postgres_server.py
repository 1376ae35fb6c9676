"""A PostgreSQL server of its own: made in a temporary folder, reached through a socket there, stopped at the end."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

PROGRAMS = ("initdb", "pg_ctl", "postgres", "psql")
SETTINGS = "fsync=off", "synchronous_commit=off", "full_page_writes=off", "log_min_messages=fatal"
USER = "tester"
GUARDED, PASSWORD = "guarded", "pass w/ord:@%41"  # a user who needs it
_ACCESS = f"local all {GUARDED} scram-sha-256\nlocal all all trust\n"


class PostgresServer:
    """A running server.

    Parameters
    ----------
    folder : of its data and of its socket.
    port : of the socket's name; no network port is opened.
    """

    def __init__(self, folder: Path, port: int = 5432):
        self.folder, self.port = folder, port

    def source(self, database: str = "postgres", user: str = USER, password: str = "") -> str:
        """Return the address of a database for `export-data --source`."""
        secret = f":{quote(password, safe='')}" if password else ""
        return f"postgresql://{user}{secret}@/{database}?host={quote(str(self.folder), safe='')}&port={self.port}"

    def run_sql(self, text: str, database: str = "postgres") -> str:
        """Run SQL as the owner and return what it prints, without headers."""
        command = [_program("psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-d", self.source(database)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def missing_postgres_programs() -> list[str]:
    """Return the programs of the server that this machine does not have."""
    return [name for name in PROGRAMS if _program(name) is None]


def _program(name: str) -> str | None:
    """Return the path of a program: on the PATH, or where Debian has it, the newest version."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name))
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, reversed(versions))]))


@contextmanager
def postgres_server(*settings: str) -> Iterator[PostgresServer]:
    """Start a server in a new temporary folder, as an unprivileged user where this process is root; stop it at the end.

    settings : NAME=VALUE of postgresql.conf.
    """
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # the socket's path is limited to 107 bytes
    data = folder / "data"
    user = _unprivileged_user()
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
        folder.chmod(0o755)

    def run(*command: object) -> None:
        who = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        done = subprocess.run(
            [_program(str(command[0])), *map(str, command[1:])], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False, timeout=120, cwd=folder,
            env={**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC"}, **who,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout

    try:
        run("initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync")
        placed = f"unix_socket_directories = '{folder}'", "listen_addresses = ''"
        with open(data / "postgresql.conf", "a") as file:
            file.write("\n".join([*placed, *SETTINGS, *settings, ""]))
        (data / "pg_hba.conf").write_text(_ACCESS)
        run("pg_ctl", "-D", data, "-l", folder / "log", "-w", "start")
        try:
            yield PostgresServer(folder)
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged_user() -> pwd.struct_passwd | None:
    """Return the user that the server runs as, where this process is root, which the server refuses."""
    if os.geteuid():
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise AssertionError("no unprivileged user to run the server as")
