"""Without Ray, `meshmend.launch.ray` says in one line what to install."""

from forked_script import run_program


def test_without_ray_the_module_says_what_to_install() -> None:
    program = (
        "import sys\n"
        "sys.modules['ray'] = None\n"
        "from meshmend.errors import InputError\n"
        "try:\n"
        "    import meshmend.launch.ray\n"
        "except InputError as error:\n"
        "    print(error)\n"
    )
    done = run_program(program)

    assert done.stderr == ""
    assert done.stdout == (
        "meshmend.launch.ray needs ray, but it is not installed; run: pip install 'meshmend[ray]'\n"
    )
