"""How much of train_grpo.py a default run executes, and how much a reader must look up.

    python tests/trace.py           a minute on one core
    python tests/trace.py --list    also prints the statements that did not run, and the names

It trains two steps in this process, on the CPU, with default flags except for sizes, and prints

    (a) the statements above the end of `main` that did not run, as N of M, with their lines; and
        those of `token_logps` and of `sample`, wherever these two are defined
    (b) the names of the project's own modules that are used above the end of `main`
    (c) the number of lines to the end of `main`, and of the script
    (d) the number of parameters of `grpo_loss`, and of its lines before the first tensor operation

Only statements of functions and methods count. Docstrings, def and class lines, imports, and
decorators don't; a `raise` does. An `if`, `for`, or `with` has run if its first line has. A module
is the project's own if its file lies in the repository.
"""
import ast
import importlib.util
import io
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_grpo.py"
TENSORS = {"logps", "old_logps", "advantages", "mask", "ref_logps"}     # of grpo_loss
FLAGS = ["--device", "cpu", "--dtype", "float32", "--max_steps", "2", "--batch_size", "4",
         "--num_generations", "4", "--max_gen_len", "48", "--eval_samples", "16"]


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree):
    """Yields the functions of a file and the methods of its classes, but not nested functions."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from (one for one in node.body if isinstance(one, ast.FunctionDef))
        elif isinstance(node, ast.FunctionDef):
            yield node


def statements(function):
    """Yields (first line, last line of its head) for each statement of a function that counts."""
    uncounted = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global,
                 ast.Nonlocal)
    for node in ast.walk(function):
        if not isinstance(node, ast.stmt) or isinstance(node, uncounted):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
        yield node.lineno, max(node.lineno, end)


def is_own(module):
    """Whether a module's file, or folder, lies in the repository."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    places = [spec.origin] if spec and spec.origin else list(
        getattr(spec, "submodule_search_locations", None) or [])
    return any(place and Path(place).is_relative_to(ROOT)
               and "site-packages" not in Path(place).parts for place in places)


def local_names(function):
    """A function's parameters, and what it assigns: these hide the names of the module."""
    return {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)} | {
        node.id for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        and isinstance(function, ast.FunctionDef)}


def own_names(tree, end):
    """The names of the project's own modules that are used above line `end`.

    A module that is imported whole counts once for each of its attributes that is used.
    """
    modules, names, used = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if is_own(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module and is_own(node.module):
            for alias in node.names:
                is_module = is_own(f"{node.module}.{alias.name}")
                (modules if is_module else names).add(alias.asname or alias.name)
    for top in tree.body:
        if top.lineno > end or isinstance(top, (ast.Import, ast.ImportFrom)):
            continue
        hidden = local_names(top)
        for node in ast.walk(top):
            if getattr(getattr(node, "value", node), "id", None) in hidden:
                continue
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in modules:
                used.add(f"{node.value.id}.{node.attr}")
            elif isinstance(node, ast.Name) and node.id in names:
                used.add(node.id)
    return sorted(used)


def lines_before_tensors(function):
    """The number of lines, after the docstring, before anything is computed with a tensor."""
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    for part in (part for node in body for part in ast.walk(node)):
        operands = []
        if isinstance(part, (ast.Attribute, ast.Subscript)):
            operands = [part.value]
        elif isinstance(part, ast.BinOp):
            operands = [part.left, part.right]
        elif isinstance(part, ast.Compare) and not any(
                isinstance(op, (ast.Is, ast.IsNot)) for op in part.ops):
            operands = [part.left, *part.comparators]
        if any(isinstance(one, ast.Name) and one.id in TENSORS for one in operands):
            return part.lineno - body[0].lineno
    return body[-1].end_lineno - body[0].lineno + 1


def traced(files, call):
    """Returns {file: its lines that ran in this thread} after calling `call`."""
    seen, before = {str(path): set() for path in files}, sys.gettrace()

    def local(frame, event, argument):
        seen[frame.f_code.co_filename].add(frame.f_lineno)
        return local

    sys.settrace(lambda frame, event, argument:
                 local(frame, event, argument) if frame.f_code.co_filename in seen else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen


def run_default():
    import train_grpo
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        train_grpo.main([*FLAGS, "--out_dir", folder, "--run_name", "traced"])


def measure():
    """Trains two steps; returns {name: number, list of lines, or list of names}.

    For a list of lines that did not run, the name is that of the function, or "above".
    """
    tree = tree_of(SCRIPT)
    by_name = {node.name: node for node in functions(tree)}
    end, loss = by_name["main"].end_lineno, by_name["grpo_loss"]
    read = {"above": (SCRIPT, [node for node in functions(tree) if node.lineno <= end])}
    for path in (SCRIPT, *sorted(ROOT.glob("model/*.py"))):
        for node in tree_of(path).body:         # not the methods of these names
            if getattr(node, "name", "") in ("token_logps", "sample"):
                read.setdefault(node.name, (path, [node]))
    ran = traced({path for path, _ in read.values()}, run_default)
    found = {}
    for name, (path, nodes) in read.items():
        own = sorted({pair for node in nodes for pair in statements(node)})
        found[name] = [first for first, last in own
                       if ran[str(path)].isdisjoint(range(first, last + 1))]
        found[f"statements of {name}"] = len(own)
    return found | {
        "names": own_names(tree, end), "lines to the end of main": end,
        "lines of the script": len(SCRIPT.read_text(encoding="utf-8").splitlines()),
        "parameters of grpo_loss": len(
            loss.args.posonlyargs + loss.args.args + loss.args.kwonlyargs),
        "lines before a tensor": lines_before_tensors(loss)}


def main():
    sys.path.insert(0, str(ROOT))
    found, text = measure(), SCRIPT.read_text(encoding="utf-8").splitlines()
    print(f"(a) above the end of main: {len(found['above'])} of {found['statements of above']} "
          "statements do not run by default\n    lines", *found["above"] or ["none"])
    for name in ("token_logps", "sample"):
        print(f"    of {name}: {len(found[name])} of {found[f'statements of {name}']}")
    names = found["names"]
    print(f"(b) names of the project's own modules above the end of main: {len(names)}")
    print(f"(c) lines to the end of main {found['lines to the end of main']}, of the script "
          f"{found['lines of the script']}")
    print(f"(d) grpo_loss: {found['parameters of grpo_loss']} parameters, "
          f"{found['lines before a tensor']} lines before its first tensor operation")
    if "--list" in sys.argv[1:]:
        print(*(f"{line:4} {text[line - 1].strip()}" for line in found["above"]), sep="\n")
        print(*names, sep=", ")


if __name__ == "__main__":
    main()
