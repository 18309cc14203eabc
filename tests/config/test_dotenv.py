import pytest

from quatrain.config.dotenv import find_dotenv, load_dotenv, parse_dotenv, warn_if_others_can_read
from quatrain.config.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("K=v", "v"),
        ("export K=v", "v"),
        ("  K = v  ", "v"),
        ("K=", ""),
        ("K= # comment", ""),
        ("K=v # comment", "v"),
        ("K=v#1", "v#1"),
        ("K=#1", "#1"),
        ("K='a # b'", "a # b"),
        ("K='a\\n' # comment", "a\\n"),
        ('K="a # b"', "a # b"),
        ('K="a\\n\\"b\\"\\\\"', 'a\n"b"\\'),
        ('K=""', ""),
        ("K=a b", "a b"),
        ("K=a=b", "a=b"),
        ("K=it's", "it's"),
        ("K=${HOME}$HOME", "${HOME}$HOME"),
        ("K='a\nb'", "a\nb"),
    ],
)
def test_a_line(line, value):
    assert parse_dotenv(line, ".env") == {"K": value}


def test_comments_and_empty_lines_are_skipped():
    assert parse_dotenv("# one\n\n  # two\nA=1\r\nB=2\n", ".env") == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    "line",
    [
        "hunter2",
        "=hunter2",
        "MY-KEY=hunter2",
        "1A=hunter2",
        "K='hunter2",
        'K="hunter2',
        "K='hunter2'x",
        "K=hunter2\0",
    ],
)
def test_a_malformed_line_is_named_by_its_number_and_never_shown(line):
    with pytest.raises(ConfigError, match=r"^some/\.env, line 2: expected KEY=VALUE") as caught:
        parse_dotenv(f"A=1\n{line}\n", "some/.env")
    assert "hunter2" not in str(caught.value)


def test_blank_lines_and_comments_count_as_lines():
    with pytest.raises(ConfigError, match=r"^some/\.env, line 6: expected KEY=VALUE"):
        parse_dotenv("# one\n\nA='two\nlines'\n\nhunter2\n", "some/.env")


def test_a_variable_set_twice_is_refused():
    with pytest.raises(ConfigError, match="line 3: A is set a second time") as caught:
        parse_dotenv("A=hunter2\nB=1\nA=hunter3", ".env")
    assert "hunter" not in str(caught.value)


def test_only_unset_variables_are_filled(tmp_path):
    (tmp_path / ".env").write_text("A=file\nB=file\nC=file\n")
    environ = {"A": "mine", "B": "", "HOME": str(tmp_path / "home")}
    assert load_dotenv(environ, tmp_path) == tmp_path / ".env"
    assert environ == {"A": "mine", "B": "", "C": "file", "HOME": str(tmp_path / "home")}


def test_the_first_file_found_is_the_only_one_read(tmp_path):
    repository, home = tmp_path / "repository", tmp_path / "home"
    inside = repository / "a" / "b"
    inside.mkdir(parents=True)
    home.mkdir()
    (repository / ".git").mkdir()
    assert find_dotenv(inside, home) is None
    assert find_dotenv(inside, None) is None
    (home / ".env").write_text("A=home\n")
    assert find_dotenv(inside, home) == home / ".env"
    (repository / ".env").write_text("B=repository\n")
    environ = {"HOME": str(home)}
    assert load_dotenv(environ, inside) == repository / ".env"
    assert environ == {"HOME": str(home), "B": "repository"}


def test_no_file_changes_nothing(tmp_path):
    environ = {"HOME": str(tmp_path)}
    assert load_dotenv(environ, tmp_path) is None
    assert environ == {"HOME": str(tmp_path)}


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / ".env").write_bytes(b"A=\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_dotenv({"HOME": str(tmp_path)}, tmp_path)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_warned_about(tmp_path, mode, warns):
    path = tmp_path / ".env"
    path.write_text("A=1\n")
    path.chmod(mode)
    warning = f"{path} holds secrets and can be read by others (mode {mode:o}); run chmod 600 {path}"
    assert warn_if_others_can_read(path) == (warning if warns else None)
