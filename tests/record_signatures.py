"""Records the call signatures of real kernel packages, so that adapters are tested against them without a GPU.

    python tests/record_signatures.py ARCHIVE...

An archive is a wheel or sdist as an index has it (``pip download --no-deps``; an sdist whose metadata step needs torch
is fetched by its link), named DISTRIBUTION-VERSION... Python is read with ``ast``, registered ops by the schema text in
their binary or source, C++ bindings by their parameter list, and nothing is imported or run but the modules named under
"imported": only they can tell what their compiled part takes (the wheel has to be for the Python that runs this). What is
read of which distribution stands in ``SOURCES``; each archive becomes ``data/signatures/DISTRIBUTION-VERSION.json``.

flash-attn-3 is an empty placeholder on PyPI and amd-aiter an old development version, so for these an archive of the
repository at a commit was used, named by the commit::

    git archive --prefix=x/ HEAD hopper | gzip > flash_attn_3-3.0.0+0251105a.tar.gz       (Dao-AILab/flash-attention)
    git archive --prefix=x/ HEAD aiter/ops/mha.py | gzip > amd_aiter-0.0.0+e4048607.tar.gz            (ROCm/aiter)
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "signatures"

#: distribution -> what to read: "functions" of Python modules (file: names), "ops" (namespace::name: file that holds
#: the schema text), "bindings" (C++ function: file, and the Python file and attribute that calls it), "lists" (the
#: literals that a function puts into one of its variables: the arguments of a compiled function), "imported" (the
#: parameters of a module's callables, by signature or docstring; "new|old" where releases have them in two places).
SOURCES: dict[str, dict[str, dict[str, Any]]] = {
    "flash-attn": {
        "functions": {"flash_attn/flash_attn_interface.py": ["flash_attn_varlen_func", "FlashAttnVarlenFunc.forward"]},
        "bindings": {
            "flash_attn_2_cuda.varlen_fwd": {
                "source": ("csrc/flash_attn/flash_api.cpp", "mha_varlen_fwd"),
                "called_in": ("flash_attn/flash_attn_interface.py", "varlen_fwd"),
            }
        },
    },
    "flash-attn-3": {
        "functions": {"hopper/flash_attn_interface.py": ["flash_attn_varlen_func"]},
        "ops": {"flash_attn_3::fwd": "hopper/flash_api.cpp"},
    },
    "fa3-fwd": {
        "functions": {"fa3_fwd_interface.py": ["flash_attn_varlen_func"]},
        "ops": {"fa3_fwd::fwd": "fa3_fwd/_C.abi3.so"},
    },
    "flash-attn-4": {
        "functions": {
            "flash_attn/cute/interface.py": ["flash_attn_varlen_func", "FlashAttnVarlenFunc.forward", "_flash_attn_fwd"]
        },
        "lists": {"flash_attn/cute/interface.py": ("_flash_attn_fwd", "call_args")},
    },
    "vllm": {
        "functions": {
            "vllm/vllm_flash_attn/flash_attn_interface.py": ["flash_attn_varlen_func"],
            "vllm/vllm_flash_attn/cute/interface.py": ["_flash_attn_fwd"],
        },
        "ops": {
            "_vllm_fa2_C::varlen_fwd": "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
            "_vllm_fa3_C::fwd": "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
        },
    },
    "sglang-kernel": {
        "functions": {"sgl_kernel/flash_attn.py": ["flash_attn_varlen_func"]},
        "ops": {"sgl_kernel::fwd": "sgl_kernel/flash_ops.abi3.so"},
    },
    "flashinfer-python": {
        "functions": {
            "flashinfer/prefill.py": [
                "BatchPrefillWithRaggedKVCacheWrapper.__init__",
                "BatchPrefillWithRaggedKVCacheWrapper.plan",
                "BatchPrefillWithRaggedKVCacheWrapper.run",
                "trtllm_ragged_attention_deepseek",
            ]
        }
    },
    "nvidia-cudnn-frontend": {
        "imported": {
            "cudnn": [
                "create_handle",
                "set_stream",
                "pygraph.__init__",
                "pygraph.tensor",
                "_compiled_module.backend_graph.sdpa|pygraph.sdpa",
                "pygraph.validate",
                "pygraph.build_operation_graph",
                "pygraph.create_execution_plans",
                "pygraph.check_support",
                "pygraph.build_plans",
                "pygraph.get_workspace_size",
                "pygraph.execute",
                "graph_types.Tensor.set_uid|tensor.set_uid",
                "graph_types.Tensor.set_output|tensor.set_output",
                "graph_types.Tensor.set_dim|tensor.set_dim",
                "graph_types.Tensor.set_stride|tensor.set_stride",
                "graph_types.Tensor.set_data_type|tensor.set_data_type",
                "graph_types.Tensor.set_ragged_offset|tensor.set_ragged_offset",
            ]
        }
    },
    "tokenspeed-mla": {
        "functions": {"tokenspeed_mla/mla_prefill.py": ["tokenspeed_mla_prefill", "warmup_compile_prefill"]}
    },
    "amd-aiter": {"functions": {"aiter/ops/mha.py": ["flash_attn_varlen_func", "FlashAttnVarlenFunc.forward"]}},
}


def main(archives: list[str]) -> int:
    if not archives:
        print(__doc__)
        return 2
    for archive in map(Path, archives):
        record = record_archive(archive)
        path = DATA / f"{record['distribution']}-{record['version']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(record) + "\n", encoding="utf-8")
        print(path)
    return 0


def record_archive(archive: Path) -> dict[str, Any]:
    """Everything that ``SOURCES`` names, read from one archive."""
    name, version = re.sub(r"\.(tar\.gz|whl)$", "", archive.name).split("-")[:2]
    distribution = name.replace("_", "-").lower()
    if distribution not in SOURCES:
        raise SystemExit(f"{archive}: nothing is known about {distribution}; it can be one of {', '.join(SOURCES)}")
    wanted = SOURCES[distribution]
    read = reader(archive)
    record: dict[str, Any] = {"distribution": distribution, "version": version, "archive": archive.name}
    for file, names in wanted.get("functions", {}).items():
        module = file.removesuffix("/__init__.py").removesuffix(".py").removeprefix("hopper/").replace("/", ".")
        tree = ast.parse(read(file))
        for function in names:
            record.setdefault("functions", {})[f"{module}:{function}"] = describe(find_function(tree, function))
    for op, file in wanted.get("ops", {}).items():
        record.setdefault("ops", {})[op] = op_schema(read(file), op.split("::")[1])
    for file, (function, variable) in wanted.get("lists", {}).items():
        literals = list(list_literals(find_function(ast.parse(read(file)), function), variable))
        if literals:
            record.setdefault("lists", {})[f"{function}:{variable}"] = literals
    for module, callables in wanted.get("imported", {}).items():
        record.setdefault("imported", {})[module] = imported(archive, module, callables)
    for binding, places in wanted.get("bindings", {}).items():
        (source, function), (caller, attribute) = places["source"], places["called_in"]
        passed, unpacked = call_of(ast.parse(read(caller)), attribute)
        parameters = cpp_parameters(read(source).decode(), function)
        record.setdefault("bindings", {})[binding] = {
            "parameters": parameters,
            "passed": passed,
            "returns": unpacked,
        }
    return record


#: Run in a process of its own, with the unpacked wheel before everything else: prints {name: parameters}.
ASK = """
import importlib, inspect, json, re, sys
module, wanted = sys.argv[1], json.loads(sys.argv[2])
module, answer = importlib.import_module(module), {}
for places in wanted:
    for place in places.split("|"):
        found = module
        for part in place.split("."):
            found = getattr(found, part, None)
        if found is not None:
            break
    text = found.__doc__ or ""
    if inspect.isfunction(found):
        parameters = list(inspect.signature(found).parameters)
    elif first := re.search(r"(?m)^(?:1. )?\\w+\\((.*)\\) ->", text):  # pybind11; of overloads the first
        parameters = re.findall(r"(?:^|, )(\\w+): ", first[1])
    else:
        parameters = ["self", *re.findall(r"(?m)^ +(\\w+) \\(", text.partition("Args:")[2])]
    answer[places.split("|")[-1]] = parameters
print(json.dumps(answer))
"""


def imported(archive: Path, module: str, callables: list[str]) -> dict[str, list[str]]:
    """What the callables of a wheel's module take, by the names of their parameters."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(archive).extractall(folder)
        ask = [sys.executable, "-c", ASK, module, json.dumps(callables)]
        answer = subprocess.run(ask, env={"PYTHONPATH": folder}, check=True, capture_output=True, text=True)
    parameters: dict[str, list[str]] = json.loads(answer.stdout)
    return parameters


def reader(archive: Path) -> Callable[[str], bytes]:
    """A function that reads one file by its path inside the archive (inside the top folder, for an sdist)."""
    if archive.suffix == ".whl":
        wheel = zipfile.ZipFile(archive)
        return wheel.read
    sdist = tarfile.open(archive)  # noqa: SIM115 - lives as long as the reader
    members = {member.name.split("/", 1)[-1]: member for member in sdist.getmembers()}

    def read(file: str) -> bytes:
        content = sdist.extractfile(members[file])
        assert content is not None
        return content.read()

    return read


def find_function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """``function`` or ``Class.method``; of overloads the last, which is the one that runs."""
    *owner, function = name.split(".")
    body: list[ast.stmt] = tree.body
    for part in owner:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part)
    return [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function][-1]


def describe(function: ast.FunctionDef) -> dict[str, Any]:
    returns = [node.value for node in own_nodes(function) if isinstance(node, ast.Return) and node.value is not None]
    return {"parameters": list(parameters_of(function.args)), "returns": list(dict.fromkeys(map(ast.unparse, returns)))}


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop(0)
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            pending = [*ast.iter_child_nodes(node), *pending]


def parameters_of(arguments: ast.arguments) -> Iterator[dict[str, str]]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = "POSITIONAL_ONLY" if index < len(arguments.posonlyargs) else "POSITIONAL_OR_KEYWORD"
        yield parameter(argument.arg, kind, default)
    if arguments.vararg:
        yield parameter(arguments.vararg.arg, "VAR_POSITIONAL", None)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield parameter(argument.arg, "KEYWORD_ONLY", default)
    if arguments.kwarg:
        yield parameter(arguments.kwarg.arg, "VAR_KEYWORD", None)


def parameter(name: str, kind: str, default: ast.expr | None) -> dict[str, str]:
    entry = {"name": name}
    if kind != "POSITIONAL_OR_KEYWORD":
        entry["kind"] = kind
    if default is not None:
        entry["default"] = ast.unparse(default)
    return entry


def op_schema(content: bytes, name: str) -> str:
    """The schema text of a registered op, from a binary or a source file that spreads it over string literals."""
    text = content.decode("latin-1")
    if "\x00" not in text:
        text = re.sub(r'"\s*\n?\s*"', "", text)
    found = set(re.findall(rf"(?<![\w]){name}\(Tensor[^\x00\"]+?\) -> [^\x00\"]+", text))
    found = {re.sub(r"\s+", " ", schema).strip() for schema in found}
    if len(found) != 1:
        raise SystemExit(f"{name}: {len(found)} schemas found, expected one: {sorted(found)}")
    return found.pop()


def cpp_parameters(text: str, function: str) -> list[str]:
    """The parameter names of a C++ function."""
    match = re.search(rf"^{function}\((.*?)\) \{{", text, re.DOTALL | re.MULTILINE)
    assert match, f"{function} is not in the source"
    without_comments = re.sub(r"//[^\n]*", "", match[1])
    return [re.findall(r"\w+", part)[-1] for part in without_comments.split(",")]


def call_of(tree: ast.Module, attribute: str) -> tuple[list[str], list[str]]:
    """How the package's own Python calls ``something.attribute(...)``: the arguments, and the names of the results."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Tuple):
            call, names = node.value, node.targets[0].elts
            if isinstance(call.func, ast.Attribute) and call.func.attr == attribute:
                return [ast.unparse(value) for value in call.args], [ast.unparse(name) for name in names]
    raise SystemExit(f"no call of {attribute}")


def list_literals(function: ast.FunctionDef, variable: str) -> Iterator[list[str]]:
    """What ``variable = [...]``, ``variable.append(...)`` and ``variable.extend([...])`` put in, in text order."""
    for node in sorted(ast.walk(function), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            if ast.unparse(node.targets[0]) == variable:
                yield [ast.unparse(item) for item in node.value.elts]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (f"{variable}.extend", f"{variable}.append"):
            (given,) = node.args
            yield [ast.unparse(item) for item in (given.elts if isinstance(given, ast.List) else [given])]


def to_json(record: dict[str, Any]) -> str:
    """Indented, with one line a parameter, so that a change reads well in a diff."""
    text = json.dumps(record, indent=1)
    for entry in (r"(\{)(\s+\"name\": [^{}]*?)\s+(\})", r"(\[)([^\[\]{}]*?)\s+(\])"):
        text = re.sub(entry, lambda match: match[1] + " ".join(match[2].split()) + match[3], text)
    return text


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
