"""What the JSON of an exported program may say; see `distdl.tools.serving.safe_loading`."""

from __future__ import annotations

import ast
import json
import keyword
import re
from typing import Any

from distdl.util.json_rules import (
    Unsafe,
    dropped,
    flag,
    listed,
    mapping,
    maybe,
    one_of,
    real,
    record,
    shown,
    text,
    union,
    whole,
)

# ---- names and expressions ----------------------------------------------------------------------

_identifier = text(r"[A-Za-z_]\w{0,999}", "a name")
_dunder = re.compile(r"(^|\.)__")
# Of a parameter, a buffer or a module; a module that is called again has a number after @.
_path = text(r"(\w[\w-]*(\.\w[\w-]*)*(@\d+)?)?", "a path of names")
_symbol = text(r"[a-z]{1,3}\d{1,5}", "a symbol such as s77")


def name(value: object, where: str) -> str:
    """torch writes names of nodes into Python code and executes it."""
    text_of_name = _identifier(value, where)
    if keyword.iskeyword(text_of_name) or text_of_name.startswith("__"):
        raise Unsafe(f"{where}: {shown(value)} is not a name")
    return text_of_name


def path(value: object, where: str) -> str:
    names = _path(value, where)
    if _dunder.search(names):
        raise Unsafe(f"{where}: {shown(value)} is not a path of names")
    return names


# The functions of sympy and torch in expressions of sizes, and the numbers of their arguments.
_FUNCTIONS = {
    **dict.fromkeys(("Add", "Mul", "Min", "Max"), range(1, 100)),
    **dict.fromkeys(("FloorDiv", "CeilDiv", "CleanDiv", "Mod", "PythonMod"), range(2, 3)),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), range(2, 3)),
    **dict.fromkeys(("ToFloat", "TruncToInt", "CeilToInt", "FloorToInt"), range(1, 2)),
    **dict.fromkeys(("Identity", "RoundToInt"), range(1, 2)),
    "ModularIndexing": range(3, 4),
    **dict.fromkeys(("Equality", "Unequality", "GreaterThan", "LessThan"), range(2, 3)),
    **dict.fromkeys(("StrictGreaterThan", "StrictLessThan"), range(2, 3)),
    **dict.fromkeys(("Eq", "Ne", "Ge", "Gt", "Le", "Lt"), range(2, 3)),
}
_ASSUMPTIONS = ("positive", "nonnegative", "integer", "real", "finite", "zero", "nonzero")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_LONGEST = 2000
_LARGEST = 2**63


def expression(value: object, where: str) -> str:
    """torch hands it to sympy.sympify, which evaluates it as Python. So it must be a sum, a product
    or the like of whole numbers and symbols, and nothing else."""
    try:
        if not isinstance(value, str) or not value.isascii() or len(value) > _LONGEST:
            raise Unsafe("it is too long, or no text")
        _check(ast.parse(value, mode="eval").body, where)
    except (Unsafe, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unsafe(f"{where}: {shown(value)} is not an expression of sizes") from error
    return value


def _check(node: ast.AST, where: str) -> None:
    if isinstance(node, ast.Constant):
        whole(-_LARGEST, _LARGEST)(node.value, where)
    elif isinstance(node, ast.Name):
        _symbol(node.id, where)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        _check(node.operand, where)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        _check(node.left, where)
        _check(node.right, where)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        _check_call(node.func.id, node, where)
    else:
        raise Unsafe(type(node).__name__)


def _check_call(function: str, node: ast.Call, where: str) -> None:
    if function == "Symbol":
        (symbol,) = node.args
        _symbol(symbol.value if isinstance(symbol, ast.Constant) else None, where)
        for assumption in node.keywords:
            one_of(*_ASSUMPTIONS)(assumption.arg, where)
            chosen = assumption.value
            flag(chosen.value if isinstance(chosen, ast.Constant) else None, where)
    elif function == "Integer":
        (number,) = node.args
        number = number.operand if isinstance(number, ast.UnaryOp) else number
        whole(0, _LARGEST)(number.value if isinstance(number, ast.Constant) else None, where)
    elif len(node.args) in _FUNCTIONS.get(function, ()) and not node.keywords:
        for argument in node.args:
            _check(argument, where)
    else:
        raise Unsafe(function)


# What a node of the graph calls. torch resolves it with getattr from `torch`, `operator` or `math`.
_TARGET = re.compile(
    r"torch\.ops\.(?P<space>aten|prims|torchvision)\.(?P<op>[a-z_]\w*)\.[A-Za-z]\w*"
    r"|_operator\.(add|sub|mul|floordiv|mod|neg|pos|truediv|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
    r"|torch\.sym_(int|float|max|min|not|ite|sum)|math\.(ceil|floor|trunc|sqrt)",
    re.ASCII,
)
# Internal operators that torch.export writes; others trust their arguments.
_INTERNAL = (
    "_adaptive_avg_pool2d",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "_log_softmax",
    "_native_batch_norm_legit_no_training",
    "_softmax",
    "_to_copy",
    "_unsafe_view",
)
# Operators that read files, or put a tensor on memory that is not its own.
_HARMFUL = ("from_file", "set", "set_", "set_data", "record_stream", "resize_as_sparse_")


def target(value: object, where: str) -> str:
    match = _TARGET.fullmatch(value) if isinstance(value, str) else None
    op = match["op"] if match else None
    if match is None or op in _HARMFUL or (op and op[0] == "_" and op not in _INTERNAL):
        raise Unsafe(f"{where}: {shown(value)} is not an operator that an export may call")
    return match.string


_TREES = (None, "builtins.tuple", "builtins.list", "builtins.dict")


def tree(value: object, where: str) -> str:
    """How the arguments are nested. torch looks other types up, and imports what they name."""
    written = text(r"(?s).*", "a nesting of arguments")(value, where)
    try:
        version, root = json.loads(written)
    except (ValueError, TypeError):
        raise Unsafe(f"{where}: {shown(value)} is not a nesting of arguments") from None
    one_of(1)(version, where)
    _nesting(root, where)
    return written


def _nesting(value: object, where: str) -> dict[str, Any]:
    rule = record(
        type=one_of(*_TREES),
        context=one_of(None, "null", "[]"),
        children_spec=listed(_nesting),
    )
    return rule(value, where)


# ---- the schema of torch.export (torch/_export/serde/schema.py), as far as distdl writes it ------

_tensor = record(name=name)
_integers = listed(whole())
_size = union(
    as_int=whole(), as_expr=record(expr_str=expression, hint=maybe(union(as_int=whole())))
)
_bool = union(as_bool=flag, as_expr=record(expr_str=expression, hint=maybe(union(as_bool=flag))))
_float = union(as_float=real, as_expr=record(expr_str=expression, hint=maybe(union(as_float=real))))
_sym_int = union(as_int=whole(), as_name=name)
_sym_bool = union(as_bool=flag, as_name=name)
_sym_float = union(as_float=real, as_name=name)
_number = whole(0, 200)  # of a dtype, a layout, a memory format
# An export is written on the CPU, and answers there.
_device = record(type=one_of("cpu"), index=one_of(None, 0))
_meta = record(
    dtype=_number,
    sizes=listed(_size),
    strides=listed(_size),
    storage_offset=_size,
    requires_grad=flag,
    device=_device,
    layout=_number,
)
_argument = union(
    as_none=flag,
    as_tensor=_tensor,
    as_tensors=listed(_tensor),
    as_optional_tensors=listed(union(as_tensor=_tensor, as_none=flag)),
    as_int=whole(),
    as_ints=_integers,
    as_float=real,
    as_floats=listed(real),
    as_bool=flag,
    as_bools=listed(flag),
    as_string=text(r"[\x20-\x7e]{0,200}", "a short text"),
    as_sym_int=_sym_int,
    as_sym_ints=listed(_sym_int),
    as_sym_bool=_sym_bool,
    as_sym_bools=listed(_sym_bool),
    as_sym_float=_sym_float,
    as_sym_floats=listed(_sym_float),
    as_scalar_type=_number,
    as_memory_format=_number,
    as_layout=_number,
    as_device=_device,
)
_node = record(
    target=target,
    inputs=listed(record(name=text(r"\w*", "a name"), arg=_argument, kind=one_of(None, 0, 1, 2))),
    outputs=listed(_argument),
    name=maybe(name),
    metadata=dropped({}),  # only for debugging
    is_hop_single_tensor_return=one_of(None),
)
_only_tensor = union(as_tensor=_tensor)
_graph = record(
    inputs=listed(_only_tensor),
    outputs=listed(_only_tensor),
    nodes=listed(_node),
    tensor_values=mapping(name, _meta),
    sym_int_values=mapping(name, _size),
    sym_float_values=mapping(name, _float),
    sym_bool_values=mapping(name, _bool),
    custom_obj_values=one_of({}),
    is_single_tensor_return=flag,
)
_signature = record(
    input_specs=listed(
        union(
            parameter=record(arg=_tensor, parameter_name=path),
            buffer=record(arg=_tensor, buffer_name=path, persistent=flag),
            tensor_constant=record(arg=_tensor, tensor_constant_name=path),
            user_input=record(arg=_only_tensor),
        )
    ),
    output_specs=listed(union(user_output=record(arg=_only_tensor))),
)
_call = record(
    inputs=listed(_only_tensor),
    outputs=listed(_only_tensor),
    in_spec=tree,
    out_spec=tree,
    forward_arg_names=maybe(listed(name)),
)
PROGRAM = record(
    graph_module=record(
        graph=_graph,
        signature=_signature,
        module_call_graph=listed(record(fqn=path, signature=maybe(_call))),
        metadata=dropped({}),
        treespec_namedtuple_fields=one_of({}),
    ),
    opset_version=mapping(one_of("aten"), whole(0, 1000)),
    range_constraints=mapping(_symbol, record(min_val=maybe(whole()), max_val=maybe(whole()))),
    schema_version=record(major=whole(0, 1000), minor=whole(0, 1000)),
    verifiers=listed(one_of("TRAINING", "ATEN")),
    torch_version=text(r"[\w.+-]*", "a version"),
    guards_code=one_of([]),  # Python that torch executes
)
# Which file of the archive holds a weight, and its shape.
PAYLOADS = record(
    config=mapping(
        path,
        record(
            path_name=text(r"(weight|tensor)_\d{1,9}", "a file of raw numbers"),
            is_param=flag,
            use_pickle=one_of(False),
            tensor_meta=record(
                dtype=_number,
                sizes=listed(union(as_int=whole(0))),
                strides=listed(union(as_int=whole(0))),
                storage_offset=union(as_int=whole(0)),
                requires_grad=flag,
                device=_device,
                layout=_number,
            ),
        ),
    )
)
