"""Commands of gcloud for each step, as lists of words; no shell reads them.

Grammar: cloud.google.com/sdk/gcloud/reference (compute tpus, storage, secrets, services), SDK 528.0.0.
"""

from ml_factory.tpu.settings import SliceSettings

FOLDER = "ml_factory_tpu"  # in the home folder of each worker
SERVICES = ("compute.googleapis.com", "tpu.googleapis.com", "storage.googleapis.com", "secretmanager.googleapis.com")
_QUEUE, _MACHINE = ("compute", "tpus", "queued-resources"), ("compute", "tpus", "tpu-vm")
Command = tuple[str, ...]


def _project(settings: SliceSettings) -> Command:
    return f"--project={settings['PROJECT_ID']}", "--quiet"


def _place(settings: SliceSettings) -> Command:
    return f"--zone={settings['ZONE']}", *_project(settings)


def enable_services(settings: SliceSettings) -> Command:
    """Return the command that enables the interfaces of the project."""
    names = SERVICES if settings.secret else SERVICES[:-1]
    return "services", "enable", *names, *_project(settings)


def describe_bucket(settings: SliceSettings) -> Command:
    """Return the command that finds the bucket."""
    return "storage", "buckets", "describe", f"gs://{settings['BUCKET']}", "--format=json", *_project(settings)


def create_bucket(settings: SliceSettings) -> Command:
    """Return the command that makes the bucket in the region of the slice."""
    return (
        "storage", "buckets", "create", f"gs://{settings['BUCKET']}", f"--location={settings.region}",
        "--default-storage-class=STANDARD", "--uniform-bucket-level-access", "--public-access-prevention",
        *_project(settings),
    )  # fmt: skip


def _rule(settings: SliceSettings) -> str:
    return f"{settings['TPU_NAME']}-allow-ssh"


def describe_firewall(settings: SliceSettings) -> Command:
    """Return the command that finds the firewall rule."""
    return "compute", "firewall-rules", "describe", _rule(settings), "--format=json", *_project(settings)


def create_firewall(settings: SliceSettings) -> Command:
    """Return the command that allows ssh from the given address range."""
    return (
        "compute", "firewall-rules", "create", _rule(settings), f"--network={settings['NETWORK'] or 'default'}",
        "--allow=tcp:22", f"--source-ranges={settings['ALLOW_SSH_FROM']}", *_project(settings),
    )  # fmt: skip


def delete_firewall(settings: SliceSettings) -> Command:
    """Return the command that deletes the firewall rule."""
    return "compute", "firewall-rules", "delete", _rule(settings), *_project(settings)


def config_ssh(settings: SliceSettings) -> Command:
    """Return the command that writes keys and hosts for ssh."""
    return "compute", "config-ssh", *_project(settings)


def describe_secret(settings: SliceSettings) -> Command:
    """Return the command that finds the secret."""
    return "secrets", "describe", settings.secret, "--format=json", *_project(settings)


def create_secret(settings: SliceSettings) -> Command:
    """Return the command that makes the secret from standard input."""
    return (
        "secrets", "create", settings.secret, "--replication-policy=automatic", "--data-file=-", *_project(settings)
    )  # fmt: skip


def add_secret_version(settings: SliceSettings) -> Command:
    """Return the command that gives the secret a new value from standard input."""
    return "secrets", "versions", "add", settings.secret, "--data-file=-", *_project(settings)


def request_slice(settings: SliceSettings) -> Command:
    """Return the command that requests the slice."""
    words = [
        *_QUEUE, "create", settings.request, f"--node-id={settings['TPU_NAME']}",
        f"--accelerator-type={settings['ACCELERATOR_TYPE']}", f"--runtime-version={settings['RUNTIME_VERSION']}",
    ]  # fmt: skip
    given = {"network": "NETWORK", "subnetwork": "SUBNETWORK", "service-account": "SERVICE_ACCOUNT",
             "valid-until-duration": "VALID_UNTIL"}  # fmt: skip
    words += [f"--{flag}={settings[name]}" for flag, name in given.items() if settings[name]]
    words += ["--scopes=https://www.googleapis.com/auth/cloud-platform"]
    words += [
        f"--{flag}" for flag, name in {"spot": "SPOT", "internal-ips": "INTERNAL_IPS"}.items() if settings.is_on(name)
    ]
    return *words, *_place(settings)


def describe_request(settings: SliceSettings) -> Command:
    """Return the command that gives the state of the request."""
    return *_QUEUE, "describe", settings.request, "--format=json", *_place(settings)


def delete_request(settings: SliceSettings) -> Command:
    """Return the command that deletes the slice with its request."""
    return *_QUEUE, "delete", settings.request, "--force", *_place(settings)


def describe_slice(settings: SliceSettings) -> Command:
    """Return the command that gives the state of the slice's machines."""
    return *_MACHINE, "describe", settings["TPU_NAME"], "--format=json", *_place(settings)


def copy_to_workers(settings: SliceSettings, sources: list[str]) -> Command:
    """Return the command that copies files into the home folder of all workers."""
    return *_MACHINE, "scp", *sources, f"{settings['TPU_NAME']}:", "--worker=all", *_place(settings)


def run_on_workers(settings: SliceSettings, action: str, worker: str = "all") -> Command:
    """Return the command that runs an action of the worker script.

    action : "unpack", or words of the script such as "log 100"; never text of a user.
    """
    script = f"{FOLDER}/worker.sh"
    text = (
        f"mkdir -p {FOLDER} && mv worker.sh {FOLDER}/ && bash {script} unpack"
        if action == "unpack"
        else f"bash {script} {action}"
    )
    return *_MACHINE, "ssh", settings["TPU_NAME"], f"--worker={worker}", f"--command={text}", *_place(settings)


def open_shell(settings: SliceSettings, worker: int) -> Command:
    """Return the command that opens a terminal on a worker."""
    return *_MACHINE, "ssh", settings["TPU_NAME"], f"--worker={worker}", *_place(settings)
