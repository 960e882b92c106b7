"""Compiles Triton sources in a process of its own: a JSON request a line on stdin, a JSON reply a line on stdout.

Started by path with a plain interpreter, so it imports triton and nothing else. A request has `source` (a file),
`name`, `signature` ([[parameter, type], ...], pointers first), `warps`, `stages`, `arch` and `target` (path of the
result without suffix). The binary goes to `target`.cubin, then what launching needs to `target`.json; both appear by
atomic rename."""

import importlib.util
import json
import os
import re
import sys
import traceback
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compile_source(request: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("generated_kernel", request["source"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = dict(request["signature"])
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    # The launcher hands over only pointers that are multiples of 16.
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(getattr(module, request["name"]), signature, {}, attributes)
    # Triton keeps assertions only in debug mode; its overflow checks, which that mode adds, are not wanted.
    options = {"num_warps": request["warps"], "num_stages": request["stages"]}
    options |= {"debug": True, "sanitize_overflow": False} if request["asserts"] else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", request["arch"], 32), options=options)
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", compiled.asm["ptx"], re.S)
    parameters = entry.group(1).count(".param") if entry else len(signature)
    record = {
        "name": compiled.metadata.name,
        "warps": compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        "scratch": parameters - len(signature),
        "scratch_bytes": getattr(compiled.metadata, "global_scratch_size", 0),
    }
    write(request["target"] + ".ptx", compiled.asm["ptx"].encode())
    write(request["target"] + ".cubin", compiled.asm["cubin"])
    write(request["target"] + ".json", json.dumps(record).encode())


def write(path: str, data: bytes) -> None:
    fresh = f"{path}.{os.getpid()}"
    with open(fresh, "wb") as file:
        file.write(data)
    os.replace(fresh, path)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what triton prints must not mix with the replies
    for line in sys.stdin:
        try:
            compile_source(json.loads(line))
            reply = {}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
