"""Stand-in for gcloud on the PATH: checks arguments against the documented grammar, answers as the scenario has it.

Grammar: synopses of cloud.google.com/sdk/gcloud/reference (SDK 528.0.0). The folder STAND_IN holds scenario.json (lists
of answers; the last one repeats), memory.json and calls.jsonl.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

WIDE, PLACE = "--project= --quiet --format=", "--zone="
QUEUE, MACHINE = "compute tpus queued-resources", "compute tpus tpu-vm"
# command -> (fewest and most positionals, flags: those with = take a value, flags that must stand)
GRAMMAR = {
    "services enable": (1, 20, "--async", ""),
    "storage buckets describe": (1, 1, "--raw", ""),
    "storage buckets create": (
        1, 9, "--location= --default-storage-class= --uniform-bucket-level-access --public-access-prevention "
        "--placement=", "",
    ),
    "secrets describe": (1, 1, "--location=", ""),
    "secrets create": (1, 1, "--replication-policy= --data-file= --labels=", ""),
    "secrets versions add": (1, 1, "--data-file= --location=", "--data-file"),
    f"{QUEUE} create": (
        1, 1, f"{PLACE} --node-id= --accelerator-type= --runtime-version= --network= --spot --subnetwork= --async "
        "--service-account= --valid-until-duration= --internal-ips --scopes=",
        "--node-id --accelerator-type --runtime-version --zone",
    ),
    f"{QUEUE} describe": (1, 1, PLACE, "--zone"),
    f"{QUEUE} delete": (1, 1, f"{PLACE} --async --force", "--zone"),
    f"{MACHINE} describe": (1, 1, PLACE, "--zone"),
    f"{MACHINE} scp": (2, 99, f"{PLACE} --worker= --recurse --compress", "--zone"),
    f"{MACHINE} ssh": (1, 1, f"{PLACE} --worker= --command= --internal-ip", "--zone"),
}  # fmt: skip
ERRORS = {
    "quota": (1, "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit 'TPUV4sPreemptiblePodPerProject' has been exceeded."),
    "missing": (1, "ERROR: (gcloud) NOT_FOUND: Resource was not found"),
    "forbidden": (1, "ERROR: (gcloud) PERMISSION_DENIED: the caller does not have permission"),
    "login": (1, "ERROR: (gcloud) You do not currently have an active account selected. Run: gcloud auth login"),
    "timeout": (255, "ssh: connect to host 10.0.0.2 port 22: Connection timed out"),
    "pip": (1, "ERROR: No matching distribution for torch==2.9.0"),
    "warned": (1, "WARNING: Your active project does not match the quota project in your local Application Default "
                  "Credentials file.\nERROR: (gcloud) NOT_FOUND: Resource was not found"),
    "long": (1, "ERROR: (gcloud) FAILED_PRECONDITION: the network default is absent\n- '@type': googleapis.com/Info\n"
                "  domain: tpu.googleapis.com\n  metadata:\n    service: tpu\n  reason: NETWORK\n- links: []"),
    "broken": (1, "ERROR: gcloud crashed (AttributeError)"),
}  # fmt: skip


def refuse(text: str) -> None:
    print(f"ERROR: (gcloud) grammar: {text}", file=sys.stderr)
    sys.exit(2)


def parse(words: list[str]) -> tuple[str, list[str], dict[str, str | None]]:
    """Return command, positionals and flags; exit with 2 for what gcloud's grammar has not."""
    name = next((name for name in GRAMMAR if words[: len(name.split())] == name.split()), "")
    if not name:
        refuse(f"unknown command {words[:4]}")
    fewest, most, known, needed = GRAMMAR[name]
    flags, found, rest = f"{WIDE} {known}".split(), {}, []
    for word in words[len(name.split()) :]:
        flag, sign, value = word.partition("=")
        if not word.startswith("-"):
            rest.append(word)
        elif f"{flag}{sign}" not in flags or flag in found or (sign and not value):
            refuse(f"{name}: {word}")
        else:
            found[flag] = value
    if not fewest <= len(rest) <= most or {"--project", *needed.split()} - set(found):
        refuse(f"{name}: {rest}, {sorted(found)}")
    return name, rest, found


class Play:
    """The scenario, and what happened so far."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "memory.json"
        self.scenario = json.loads((folder / "scenario.json").read_text())
        self.memory = json.loads(self.path.read_text()) if self.path.exists() else {}

    def next(self, kind: str, usual: str) -> str:
        """Return the next answer of a kind, and remember it."""
        answers, number = self.scenario.get(kind, [usual]), self.memory.get(f"#{kind}", 0)
        self.memory[f"#{kind}"] = number + 1
        self.save()
        return answers[min(number, len(answers) - 1)]

    def save(self) -> None:
        self.path.write_text(json.dumps(self.memory))

    def has(self, kind: str, name: str) -> bool:
        return name in self.memory.get(kind, [])

    def add(self, kind: str, name: str) -> None:
        self.memory[kind] = [*self.memory.get(kind, []), name]
        self.save()


def fail(answer: str) -> None:
    if answer in ERRORS:
        code, text = ERRORS[answer]
        print(text, file=sys.stderr)
        sys.exit(code)


def answer_machine(play: Play, name: str, rest: list[str], flags: dict[str, str | None]) -> None:
    """Answer tpu-vm describe, scp and ssh; with HOMES in the scenario the worker's command really runs."""
    if name.endswith("describe"):
        state = play.next("machine", "READY")
        fail(state)
        print(json.dumps({"state": state}))
        return
    action = "copy" if name.endswith("scp") else (flags.get("--command") or "shell").split()[-1]
    if " log " in (flags.get("--command") or ""):
        action = "log"
    if action == "state" and not (play.memory.get("unpacked") or play.scenario.get("homes")):
        print("bash: ml_factory_tpu/worker.sh: No such file or directory", file=sys.stderr)
        sys.exit(127)
    answer = play.next(action, {"state": "running", "log": "step 1\nstep 2"}.get(action, "ok"))
    fail(answer)
    if play.scenario.get("homes"):
        homes = sorted((play.folder / "homes").iterdir())
        for home in homes if flags["--worker"] == "all" else [homes[int(flags["--worker"] or 0)]]:
            if action == "copy":
                for source in rest[:-1]:
                    shutil.copy(source, home)
                continue
            done = subprocess.run(["bash", "-c", flags["--command"]], env={**os.environ, "HOME": str(home)}, cwd=home)
            if done.returncode:
                sys.exit(done.returncode)
    elif action == "unpack":
        play.memory["unpacked"] = True
        play.save()
    elif action == "state":
        answers = answer.split(",")
        for one in answers * 4 if len(answers) == 1 else answers:  # a v4-32 has four workers
            print(f"ML_FACTORY_WORKER {one}")
    elif action == "log":
        first = (flags["--command"] or "").split()[-1]
        lines = answer.splitlines()[int(first) - 1 if first.startswith("+") else 0 :]
        print("".join(f"{line}\n" for line in lines), end="")


def answer_request(play: Play, name: str, rest: list[str]) -> None:
    """Answer queued-resources create, describe and delete."""
    if name.endswith("create"):
        fail(play.next("create", "ok"))
        if play.memory.get("request"):
            print("ERROR: ALREADY_EXISTS", file=sys.stderr)
            sys.exit(1)
        play.memory |= {"request": rest[0], "unpacked": False}
    elif play.memory.get("request") != rest[0]:
        fail("missing")
    elif name.endswith("delete"):
        fail(play.next("delete", "ok"))
        play.memory["request"] = None
    else:
        state, _, reason = play.next("request", "ACTIVE").partition(": ")
        fail(state)
        answer = json.dumps({"state": {"state": state, "failedData": {"error": {"code": 8, "message": reason}}}})
        print(state if state in ("not json", "[1]") else answer)
    play.save()


def main() -> None:
    play = Play(Path(os.environ["STAND_IN"]))
    content = "" if sys.stdin.isatty() else sys.stdin.read()
    with (play.folder / "calls.jsonl").open("a") as log:
        log.write(json.dumps({"words": sys.argv[1:], "stdin": content}) + "\n")
    name, rest, flags = parse(sys.argv[1:])
    if name.startswith(QUEUE):
        answer_request(play, name, rest)
    elif name.startswith(MACHINE):
        answer_machine(play, name, rest, flags)
    elif name.endswith("describe"):
        kind = name.split()[-2]
        fail(play.next(kind, "there" if play.has(kind, rest[0]) else "missing"))
        print("{}")
    elif name.endswith("create"):
        fail(play.next(f"create {name.split()[-2]}", "ok"))
        play.add(name.split()[-2], rest[0])
    else:
        fail(play.next(name, "ok"))


main()
