"""The public names, and the table that the errors' docstring draws."""

import inspect
import subprocess
import sys

import kvtransfer
from kvtransfer import errors
from kvtransfer.errors import KVTransferError, UnderdeterminedFit


def test_every_public_name_has_a_home_and_comes_from_it() -> None:
    assert sorted(kvtransfer.HOMES) == sorted(kvtransfer.__all__) == dir(kvtransfer)
    for name, home in kvtransfer.HOMES.items():
        found = getattr(kvtransfer, name)
        assert found.__module__ == f"kvtransfer.{home}"
        assert found.__name__ == name
        assert found.__doc__


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    assert not hasattr(kvtransfer, "no_such_name")


def test_importing_the_package_imports_no_torch() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, kvtransfer; print({'torch', 'rich'} & set(sys.modules))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == "set()"


def test_the_tree_in_the_errors_docstring_is_the_tree() -> None:
    classes = {
        name: each
        for name, each in vars(errors).items()
        if inspect.isclass(each) and issubclass(each, KVTransferError)
    }
    drawn = [
        line.lstrip("├└─ ").split()[0] for line in str(errors.__doc__).splitlines() if "─" in line
    ]

    assert sorted(["KVTransferError", *drawn]) == sorted(classes)


def test_a_hint_is_part_of_the_text_and_kept_apart_too() -> None:
    error = KVTransferError("it broke", hint="mend it")

    assert str(error) == "it broke\n  hint: mend it"
    assert (error.message, error.hint) == ("it broke", "mend it")
    assert str(KVTransferError("it broke")) == "it broke"


def test_an_underdetermined_fit_counts_for_the_caller() -> None:
    error = UnderdeterminedFit(12, 64, hint="give more text")

    assert (error.rows, error.features) == (12, 64)
    assert error.message == "12 rows cannot determine 64 coefficients and a bias per output"
    assert error.hint == "at least 65 rows are needed: give more text"
