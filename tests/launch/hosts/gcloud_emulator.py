"""Plays `gcloud compute tpus tpu-vm` for tests: refuses what is not documented, records and acts the rest.

What is allowed is written down from the reference pages of `tpu-vm ssh`, `scp`, `describe`, `create` and `delete`, and
of `queued-resources create`, `describe` and `delete` (release GA): subcommands, flags with and without value, which of
them are required, the forms of --worker, and scp's `[[USER@]INSTANCE:]PATH`. A worker is a folder: scp copies into it,
ssh runs the command there with HOME set to it. What is made is READY at once, with empty disks; "state": "ABSENT" is no
TPU. "makes" are the states that TPUs have by turns when they are made; "requests" those of requests in the queue, of
which the last brings the TPU.

Environment: GCLOUD_EMULATOR, a folder with tpu.json ({"name", "zone", "type", "state", "workers"}, and "also" for the
names of further ones like it); calls are appended to calls.jsonl in it. Worker I of the first lives in worker_I, that
of another in NAME_worker_I.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

WIDE = {"valued": {"--project", "--format", "--verbosity", "--account", "--configuration"}, "plain": {"--quiet"}}
COMMON_VALUED = {"--worker", "--zone", "--ssh-key-file", "--strict-host-key-checking"}
COMMON_VALUED |= {"--ssh-key-expiration", "--ssh-key-expire-after"}
COMMON_PLAIN = {"--dry-run", "--force-key-file-overwrite", "--internal-ip", "--plain"}
DOCUMENTED = {
    "ssh": (COMMON_VALUED | {"--command", "--output-directory", "--ssh-flag"}, COMMON_PLAIN),
    "scp": (COMMON_VALUED | {"--scp-flag"}, COMMON_PLAIN | {"--recurse", "--compress"}),
    "describe": ({"--zone"}, set()),
    "delete": ({"--zone"}, {"--async"}),
    "create": (
        {"--zone", "--accelerator-type", "--version", "--topology", "--type", "--description", "--labels", "--metadata"}
        | {"--metadata-from-file", "--network", "--subnetwork", "--range", "--scopes", "--service-account", "--tags"},
        {"--async", "--internal-ips", "--preemptible", "--reserved", "--shielded-secure-boot", "--spot"},
    ),
}
QUEUED = {
    "describe": ({"--zone"}, set()),
    "delete": ({"--zone"}, {"--async", "--force"}),
    "create": (
        {"--zone", "--accelerator-type", "--runtime-version", "--node-id", "--node-count", "--node-prefix", "--type"}
        | {"--topology", "--valid-after-duration", "--valid-after-time", "--valid-until-duration"}
        | {"--valid-until-time", "--network", "--subnetwork", "--service-account", "--tags", "--labels", "--metadata"},
        {"--async", "--guaranteed", "--internal-ips", "--reserved", "--spot"},
    ),
}
REQUIRED = {
    ("tpu-vm", "create"): ("--accelerator-type", "--version"),
    ("queued-resources", "create"): ("--accelerator-type", "--runtime-version", "--node-id"),
}
CRONTAB = """#!/bin/sh
case $1 in -l) cat "$HOME/.crontab" 2>/dev/null ;; -) cat >"$HOME/.crontab" ;; *) exit 2 ;; esac
"""
WORKER = re.compile(r"all|\d+(-\d+)?(,\d+(-\d+)?)*")
INSTANCE = re.compile(r"(?:[a-z_][a-z0-9_-]*@)?([a-z][a-z0-9-]*)")


class Refused(Exception):
    pass


def parse(argv):
    """(subcommand, positionals, flags, ssh arguments after `--`)."""
    documented = {"tpu-vm": DOCUMENTED, "queued-resources": QUEUED}.get("".join(argv[2:3]), {})
    if argv[:2] != ["compute", "tpus"] or len(argv) < 4 or argv[3] not in documented:
        raise Refused(f"no such command: gcloud {' '.join(argv[:4])}")
    subcommand, rest, after = argv[3], argv[4:], []
    if "--" in rest:
        cut = rest.index("--")
        rest, after = rest[:cut], rest[cut + 1 :]
        if subcommand != "ssh":
            raise Refused(f"{subcommand} takes no arguments after --")
    valued, plain = (allowed | wide for allowed, wide in zip(documented[subcommand], WIDE.values(), strict=True))
    positionals, flags = [], {}
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            positionals.append(word)
        elif name in valued:
            flags.setdefault(name, []).append(value if equals else rest.pop(0))
        elif word in plain:
            flags[word] = [""]
        else:
            raise Refused(f"unrecognized argument of {subcommand}: {word}")
    if missing := [name for name in REQUIRED.get((argv[2], subcommand), ()) if name not in flags]:
        raise Refused(f"{subcommand} must have {missing}")
    return subcommand, positionals, flags, after


def chosen_workers(flags, tpu):
    text = flags.get("--worker", ["0"])[-1]
    if not WORKER.fullmatch(text):
        raise Refused(f"--worker: malformed {text!r}")
    if text == "all":
        return list(range(tpu["workers"]))
    spans = [[int(n) for n in part.split("-")] for part in text.split(",")]
    workers = sorted({w for span in spans for w in range(span[0], span[-1] + 1)})
    if workers[-1] >= tpu["workers"]:
        raise Refused(f"--worker: {workers[-1]} is too large, there are {tpu['workers']}")
    return workers


def require_tpu(instance, flags, tpu):
    match = INSTANCE.fullmatch(instance)
    if not match:
        raise Refused(f"malformed instance {instance!r}")
    if (
        match[1] not in (tpu["name"], *tpu.get("also", ()))
        or flags.get("--zone") != [tpu["zone"]]
        or tpu["state"] == "ABSENT"
    ):
        raise Refused(f"NOT_FOUND: {match[1]} in {flags.get('--zone')}")
    return "" if match[1] == tpu["name"] else f"{match[1]}_"


def ssh(positionals, flags, tpu, folder):
    if len(positionals) != 1:
        raise Refused(f"ssh takes one [USER@]TPU, got {positionals}")
    prefix = require_tpu(positionals[0], flags, tpu)
    workers = chosen_workers(flags, tpu)
    if "--command" not in flags:
        raise Refused("a test has no terminal" if len(workers) == 1 else "several workers need --command")
    return [on_worker(f"{prefix}worker_{worker}", flags["--command"][-1], folder) for worker in workers]


def on_worker(worker, command, folder):
    home = folder / worker
    tools = home / ".bin"
    if not tools.exists():  # nor written while another call runs it
        tools.mkdir(parents=True)
        (tools / "hostname").write_text(f"#!/bin/sh\necho {worker.replace('worker_', 'w-')}\n")
        (tools / "hostname").chmod(0o755)
        (tools / "crontab").write_text(CRONTAB)
        (tools / "crontab").chmod(0o755)
    env = {"HOME": str(home), "PATH": f"{tools}:/usr/bin:/bin"}
    return subprocess.Popen(["bash", "-c", command], cwd=home, env=env, stdin=subprocess.DEVNULL)


def scp(positionals, flags, tpu, folder):
    if len(positionals) < 2:
        raise Refused("scp takes SRC… DEST")
    *sources, destination = positionals
    if any(":" in source for source in sources) or ":" not in destination:
        raise Refused("this stand-in plays only local to remote")
    instance, _, path = destination.partition(":")
    if path.startswith("//"):
        raise Refused(f"malformed path in {destination!r}")
    prefix = require_tpu(instance, flags, tpu)
    for worker in chosen_workers(flags, tpu):
        home = folder / f"{prefix}worker_{worker}"
        home.mkdir(exist_ok=True)
        for source in sources:
            if pathlib.Path(source).is_dir() and "--recurse" not in flags:
                raise Refused(f"{source} is a directory and --recurse is not given")
            shutil.copy(source, home / path)  # as scp: fails where the folder is not there
    return []


def describe(positionals, flags, tpu, folder):
    if len(positionals) != 1:
        raise Refused(f"describe takes one TPU, got {positionals}")
    if flags.get("--format") == ["value(state.state)"]:
        return describe_request(tpu, folder)
    require_tpu(positionals[0], flags, tpu)
    if flags.get("--format") != ["value(acceleratorType,state,health,networkEndpoints[0].ipAddress)"]:
        raise Refused("this stand-in knows two formats")
    print(f"{tpu['type']}\t{tpu['state']}\tHEALTHY\t10.130.0.4", flush=True)
    return []


def describe_request(tpu, folder):
    if not tpu.get("requests"):
        raise Refused("NOT_FOUND: no such request")
    state, *later = tpu["requests"]
    print(state, flush=True)
    (folder / "tpu.json").write_text(json.dumps(tpu | {"requests": later, "state": tpu["state"] if later else "READY"}))
    return []


def create(positionals, flags, tpu, folder):
    if positionals != [tpu["name"]] or flags.get("--node-id", positionals) != positionals:
        raise Refused(f"this stand-in makes {tpu['name']} alone, not {positionals}")
    if tpu["state"] != "ABSENT":
        raise Refused("ALREADY_EXISTS")
    if tpu.get("out_of_stock"):
        (folder / "tpu.json").write_text(json.dumps(tpu | {"out_of_stock": tpu["out_of_stock"] - 1}))
        raise Refused("RESOURCE_EXHAUSTED: there is no more capacity in the zone")
    for worker in folder.glob("worker_*"):
        shutil.rmtree(worker)
    state, *later = ["ABSENT"] if tpu.get("requests") else tpu.get("makes") or ["READY"]
    made = {"state": state, "makes": later, "type": flags["--accelerator-type"][-1]}
    (folder / "tpu.json").write_text(json.dumps(tpu | made))
    return []


def delete(positionals, flags, tpu, folder):
    require_tpu(positionals[0], flags, tpu)
    if "--quiet" not in flags:
        raise Refused("a test has no terminal to be asked on")
    (folder / "tpu.json").write_text(json.dumps(tpu | {"state": "ABSENT"}))
    return []


ACTS = {"ssh": ssh, "scp": scp, "describe": describe, "create": create, "delete": delete}


def main(argv):
    folder = pathlib.Path(os.environ["GCLOUD_EMULATOR"])
    with (folder / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(argv) + "\n")
    tpu = json.loads((folder / "tpu.json").read_text())
    try:
        subcommand, positionals, flags, _ = parse(argv)
        processes = ACTS[subcommand](positionals, flags, tpu, folder)
    except Refused as refusal:
        print(f"ERROR: (gcloud emulator) {refusal}", file=sys.stderr)
        return 2
    codes = [process.wait() for process in processes]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
