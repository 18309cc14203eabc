import jax

from quatrain.parallel.hosts import is_main_process, num_processes


def test_a_single_process_is_the_main_one():
    assert is_main_process()
    assert num_processes() == 1


def test_only_process_0_is_the_main_one(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert not is_main_process()
