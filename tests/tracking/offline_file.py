"""The points and artifacts in the real client's offline file, in its own format; run in a process of its own."""

READ = """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as proto
[file] = Path(sys.argv[1]).glob("wandb/offline-run*/*.wandb")
data, at, part = file.read_bytes(), 7, b""
while at + 7 <= len(data):  # the log format of LevelDB: blocks of 32 KiB, each record with crc, size, kind
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    size, kind = struct.unpack_from("<HB", data, at + 4)
    part += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):
        record = proto.Record()
        record.ParseFromString(part)
        part = b""
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            print(json.dumps([items["_step"], items.get("loss", items.get("train_loss"))]))
        elif record.WhichOneof("record_type") == "artifact":
            print(json.dumps(record.artifact.name))
        elif record.WhichOneof("record_type") == "request" and record.request.HasField("log_artifact"):
            print(json.dumps(record.request.log_artifact.artifact.name))
"""
