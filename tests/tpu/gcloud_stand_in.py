"""Stand-in for gcloud on the PATH: checks arguments against the documented grammar, answers as the scenario has it.

Grammar: synopses of cloud.google.com/sdk/gcloud/reference (SDK 528.0.0). The folder STAND_IN holds scenario.json (lists
of answers; the last one repeats), memory.json and calls.jsonl.
"""

import json
import os
import shlex
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


def fail(kind: str) -> None:
    code, text = ERRORS[kind]
    print(text, file=sys.stderr)
    sys.exit(code)


def answer(kind: str, usual: str) -> str:
    """Return the scenario's next answer of a kind, or exit with its error."""
    answers, number = SCENARIO.get(kind, [usual]), MEMORY.get(f"#{kind}", 0)
    MEMORY[f"#{kind}"] = number + 1
    found = answers[min(number, len(answers) - 1)]
    if found in ERRORS:
        fail(found)
    return found


def answer_machine(name: str, rest: list[str], flags: dict[str, str | None]) -> None:
    """Answer tpu-vm describe, scp and ssh; with HOMES in the scenario the worker's command really runs."""
    if name.endswith("describe"):
        print(json.dumps({"state": answer("machine", "READY")}))
        return
    command = flags.get("--command") or "shell"
    action = "copy" if name.endswith("scp") else "log" if " log " in command else command.split()[-1]
    if action == "state" and not (MEMORY.get("unpacked") or SCENARIO.get("homes")):
        print("bash: ml_factory_tpu/worker.sh: No such file or directory", file=sys.stderr)
        sys.exit(127)
    found = answer(action, {"state": "running", "log": "step 1\nstep 2"}.get(action, "ok"))
    if SCENARIO.get("homes"):
        homes = sorted((FOLDER / "homes").iterdir())
        for home in homes if flags["--worker"] == "all" else [homes[int(flags["--worker"] or 0)]]:
            command = f"cp {shlex.join(rest[:-1])} ." if action == "copy" else command
            environment = {**os.environ, "HOME": str(home)}
            done = subprocess.run(["bash", "-c", command], env=environment, cwd=home, capture_output=True, text=True)
            print(done.stdout, end="")
            print(done.stderr, end="", file=sys.stderr)
            if done.returncode:
                sys.exit(done.returncode)
    elif action == "unpack":
        MEMORY["unpacked"] = True
    elif action == "state":
        answers = found.split(",")
        for one in answers * 4 if len(answers) == 1 else answers:  # a v4-32 has four workers
            print(f"ML_FACTORY_WORKER {one}")
    elif action == "log":
        first = command.split()[-1]
        lines = found.splitlines()[int(first) - 1 if first.startswith("+") else 0 :]
        print("".join(f"{line}\n" for line in lines), end="")


def answer_request(name: str, rest: list[str]) -> None:
    """Answer queued-resources create, describe and delete."""
    if name.endswith("create"):
        answer("create", "ok")
        if MEMORY.get("request"):
            print("ERROR: ALREADY_EXISTS", file=sys.stderr)
            sys.exit(1)
        MEMORY.update(request=rest[0], unpacked=False)
    elif MEMORY.get("request") != rest[0]:
        fail("missing")
    elif name.endswith("delete"):
        answer("delete", "ok")
        MEMORY["request"] = None
    else:
        found = answer("request", "ACTIVE")
        state, _, reason = found.partition(": ")
        described = {"state": {"state": state, "failedData": {"error": {"code": 8, "message": reason}}}}
        print(found if found in ("not json", "[1]") else json.dumps(described))


def run(folder: Path, words: list[str], content: str) -> None:
    """Answer one command; the exit code is that of SystemExit."""
    global FOLDER, SCENARIO, MEMORY
    FOLDER, SCENARIO, remembered = folder, json.loads((folder / "scenario.json").read_text()), folder / "memory.json"
    MEMORY = json.loads(remembered.read_text()) if remembered.exists() else {}
    with (FOLDER / "calls.jsonl").open("a") as log:
        log.write(json.dumps({"words": words, "stdin": content}) + "\n")
    try:
        name, rest, flags = parse(words)
        kind = name.split()[-2]
        if name.startswith(QUEUE):
            answer_request(name, rest)
        elif name.startswith(MACHINE):
            answer_machine(name, rest, flags)
        elif name.endswith("describe"):
            answer(kind, "there" if rest[0] in MEMORY.get(kind, []) else "missing")
            print("{}")
        else:
            answer(name, "ok")
            MEMORY.setdefault(kind, []).append(rest[0])
    finally:
        remembered.write_text(json.dumps(MEMORY))


if __name__ == "__main__":
    run(Path(os.environ["STAND_IN"]), sys.argv[1:], "" if sys.stdin.isatty() else sys.stdin.read())
