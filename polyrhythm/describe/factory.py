"""Call a user's function by its name, `module:function`, and report its errors in one line.

No torch here: the caller interprets the function's result.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType

from polyrhythm.describe.read import unknown
from polyrhythm.errors import DescriptionError


def call_factory(source: str) -> object:
    """Return the result of `function()` of `module:function`; raise DescriptionError."""
    module_name, colon, name = source.partition(":")
    if not colon or not module_name or not name.isidentifier():
        raise DescriptionError(
            f"model {source!r}",
            expected="module:factory or file.py:factory, such as my_model.py:build",
            fix="name the file, or the module as `import` does, a colon, and the function in it",
        )
    factory = _factory(_module(module_name), name)
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise DescriptionError(
            f"{source}() raises {error_summary(error)}",
            expected="a function that returns the model and an example of its input",
            fix=f"debug it: python -c 'from {Path(module_name).stem} import {name}; {name}()'",
        ) from None


def error_summary(error: BaseException) -> str:
    """Format an error of the user's code in one line, with its location."""
    message = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {message}{_place(error.__traceback__)}"


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _module_of_file(Path(name))
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` does; the command itself is in another folder
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise DescriptionError(
                f"no module {name!r}",
                expected=f"{name.replace('.', '/')}.py in {here}, or an installed package",
                fix="change to its folder, or set PYTHONPATH to it",
            ) from None
        raise _no_import(name, error) from None
    except (Exception, SystemExit) as error:
        raise _no_import(name, error) from None


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise DescriptionError(
            f"{path}: no such file", expected="a Python file", fix="check its path"
        )
    sys.path.insert(0, str(path.absolute().parent))  # as `python file.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "its name ends in .py"
    assert spec.loader is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _no_import(path.stem, error) from None
    return module


def _no_import(name: str, error: BaseException) -> DescriptionError:
    return DescriptionError(
        f"importing {name!r} raises {error_summary(error)}",
        expected="a module that can be imported",
        fix=f"debug it: python -c 'import {name}'",
    )


def _factory(module: ModuleType, name: str) -> Callable[[], object]:
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    factory = getattr(module, name, None)
    if factory is None:
        raise unknown("function", name, functions).at(f"module {module.__name__!r}")
    if not callable(factory):
        raise DescriptionError(
            f"{module.__name__}:{name} is a {type(factory).__name__}",
            expected="a function without arguments",
            fix=f"def {name}(): return model, example",
        )
    found: Callable[[], object] = factory
    return found


def _place(trace: TracebackType | None) -> str:
    """Return the innermost line outside of installed packages: usually the user's own."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if _is_own(frame.filename)]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _is_own(filename: str) -> bool:
    library = ("site-packages", "dist-packages", f"{Path(importlib.__file__).parent.parent}/")
    ours = str(Path(__file__).parent.parent)
    return not filename.startswith(("<", ours)) and not any(part in filename for part in library)
