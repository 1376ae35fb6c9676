"""Sources of shards: a folder, files with braces, gs://, or what commands print (`pipe:`); the local file of each."""

import hashlib
import shlex
import subprocess
from pathlib import Path

from ml_factory.errors import FactoryError, FileError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.files import files, local_cache_folder
from ml_factory.storage.mirror import Mirror, fetch_file

shard_lists = LazyModule("webdataset.shardlists")
PIPE = "pipe:"
_OF_A_SHELL = frozenset("|&;<>$`\n*?~()")  # characters that only a shell would understand


def local_shards(source: str, *, allow_pipe: bool = False) -> list[Path]:
    """Return the local files of a source, in its order. Objects of a bucket are downloaded once and verified.

    source : a folder, or addresses as WebDataset writes them: braces, several joined by "::".
    allow_pipe : run the commands of `pipe:` addresses, without a shell.

    Raises SettingsError for an address that cannot be used, FileError where there are no shards, WorkspaceError where a
    bucket does not answer.
    """
    if not source.strip():
        raise SettingsError("No shards are named", where="--wds_traindir", wanted="a folder, gs://… or files in braces",
                            next_step="write some with `recipe shards`, or train on --fake_data")  # fmt: skip
    addresses = shard_lists.expand_urls(source)
    return [path for address in addresses for path in _local(address, allow_pipe)]


def _local(address: str, allow_pipe: bool) -> list[Path]:
    if address.startswith(PIPE):
        return [_printed(address.removeprefix(PIPE).strip(), allow_pipe)]
    if address.startswith("gs://") and not address.endswith(".tar"):
        mirror = Mirror(address.rstrip("/"))
        mirror.pull()
        return _of_folder(mirror.folder, address)
    if address.startswith("gs://"):
        return [fetch_file(address)]
    if "://" in address and not address.startswith("file://"):
        raise SettingsError("Shards cannot be read from there", where=address, wanted="a folder, gs:// or pipe:")
    path = Path(address.removeprefix("file://")).expanduser()
    if files.is_folder(path):
        return _of_folder(path, address)
    if not files.is_file(path):
        raise FileError("No such shard", where=path, next_step="check the path and the numbers in braces")
    return [path]


def _of_folder(folder: Path, address: str) -> list[Path]:
    names = sorted(name for name in files.names(folder) if name.endswith(".tar"))
    if not names:
        raise FileError("No shards here", where=address, wanted="files that end in .tar",
                        next_step="write some with `recipe shards`")  # fmt: skip
    return [folder / name for name in names]


def _printed(command: str, allow_pipe: bool) -> Path:
    """Run a command without a shell and keep what it prints as a local file."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingsError("This command cannot be read", where=f"{PIPE}{command}", got=error) from None
    if not allow_pipe:
        bucket = next((word for word in words if word.startswith("gs://")), "")
        raise SettingsError(
            "A command in place of shards runs only where it is allowed", where=f"{PIPE}{command}",
            next_step=(f"give {bucket} as it is: buckets are read without a command; or " if bucket else "")
            + "add --allow_pipe",
        )  # fmt: skip
    if not words or any(_OF_A_SHELL & set(word) for word in words):
        raise SettingsError("Commands run without a shell", where=f"{PIPE}{command}",
                            wanted="a program and its arguments, no pipes, redirections, variables or patterns",
                            next_step="write a script and name it")  # fmt: skip
    path = local_cache_folder("shards") / f"{hashlib.sha256(command.encode()).hexdigest()[:24]}.tar"
    files.replace(path, lambda temporary: _run(words, temporary))
    return path


def _run(words: list[str], target: Path) -> None:
    with target.open("wb") as output:
        try:
            done = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
        except OSError as error:
            raise FactoryError("This command cannot be run", where=" ".join(words), got=error) from None
    if done.returncode:
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        raise FactoryError("This command failed", where=" ".join(words), got=f"exit code {done.returncode}: "
                           f"{errors[-1] if errors else ''}")  # fmt: skip
