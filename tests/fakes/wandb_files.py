"""Reading the files of offline W&B runs: LevelDB's log format around wandb's own protobuf records."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_wandb_records(path: Path) -> Iterator[Any]:
    """Records of a `.wandb` file: a header, then blocks of 32 KiB as in LevelDB's log, each record wandb's protobuf."""
    from wandb.proto import wandb_internal_pb2

    data, block, whole = path.read_bytes(), 32768, b""
    assert data[:4] == b":W&B"
    position = 7
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + 7 : position + 7 + length]
        assert checksum == zlib.crc32(part, zlib.crc32(bytes([kind]))), "a damaged record"
        whole, position = whole + part, position + 7 + length
        if kind in (1, 4):  # full, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def read_what_is_there(path: Path) -> list[Any]:
    """The records of a run that may go on; none while a block is being written."""
    try:
        return list(read_wandb_records(path))
    except (AssertionError, struct.error):
        return []


def read_whole_run(path: Path) -> list[Any]:
    """All records up to the one that closes the run; `finish` returns before wandb's own process has written it."""
    for _ in range(600):
        records = read_what_is_there(path)
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.05)
    raise AssertionError(f"{path} was never finished")


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
