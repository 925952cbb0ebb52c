import logging
import time
import warnings

import pytest

from forge.observe.log import _RankFile, reset_logging, setup_logging


@pytest.fixture(autouse=True)
def restored_logging():
    loggers = [logging.getLogger(), logging.getLogger("forge")]
    levels = [logger.level for logger in loggers]
    yield
    reset_logging()
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_rank_0_logs_to_the_terminal_and_its_file(tmp_path, capsys):
    setup_logging(0, tmp_path / "logs")
    logging.getLogger("forge.train").info("hello %d", 7)
    assert capsys.readouterr().err[8:] == " hello 7\n"
    assert " rank 0 INFO forge.train: hello 7\n" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_other_ranks_log_everything_to_their_file_and_only_errors_to_the_terminal(tmp_path, capsys):
    setup_logging(3, tmp_path)
    logging.getLogger("forge").info("fine")
    logging.getLogger("forge").error("broken")
    assert capsys.readouterr().err[8:] == " rank 3 ERROR broken\n"
    assert [line.split(": ")[1] for line in (tmp_path / "rank-3.log").read_text().splitlines()] == [
        "fine",
        "broken",
    ]


def test_a_repeated_set_up_replaces_the_former(tmp_path, capsys):
    setup_logging(0, tmp_path / "a")
    setup_logging(0, tmp_path / "b")
    setup_logging(0, tmp_path / "b")
    logging.getLogger("forge").info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert (tmp_path / "b" / "rank-0.log").read_text().count("once") == 1
    assert (tmp_path / "a" / "rank-0.log").read_text() == ""


def test_other_libraries_log_warnings_and_errors_including_pythons_warnings(tmp_path, capsys):
    setup_logging(0, tmp_path)
    logging.getLogger("somebody").info("chatter")
    logging.getLogger("torch.distributed").warning("heed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("careful", stacklevel=1)
    text = (tmp_path / "rank-0.log").read_text()
    assert "chatter" not in text and text.count("heed") == 1 and "careful" in text
    assert capsys.readouterr().err.count("heed") == 1


def test_torchs_known_noise_is_filtered(tmp_path, capsys):
    setup_logging(0, tmp_path)
    logging.getLogger("torch.distributed.tensor._redistribute").warning("noise")
    assert "noise" not in capsys.readouterr().err + (tmp_path / "rank-0.log").read_text()


def test_an_unwritable_folder_costs_a_warning(tmp_path, capsys):
    (tmp_path / "logs").write_text("")
    setup_logging(0, tmp_path / "logs")
    logging.getLogger("forge").info("still here")
    errors = capsys.readouterr().err
    assert "WARNING no log file" in errors and "still here" in errors


def test_a_full_disk_is_reported_once_in_one_line(tmp_path, capsys, monkeypatch):
    setup_logging(0, tmp_path)
    (file,) = [handler for handler in logging.getLogger().handlers if isinstance(handler, _RankFile)]

    def full():
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(file, "flush", full)
        for _ in range(3):
            logging.getLogger("forge").info("message")
    complaints = [line for line in capsys.readouterr().err.splitlines() if "message" not in line]
    assert len(complaints) == 1 and "No space left" in complaints[0]


def test_the_first_line_of_a_new_day_has_its_date(tmp_path, capsys):
    setup_logging(0, tmp_path)
    for created in (time.time(), time.time() + 24 * 3600, time.time() + 24 * 3600):
        record = logging.makeLogRecord(
            {"name": "forge", "levelno": logging.INFO, "msg": "hello", "created": created}
        )
        logging.getLogger("forge").handle(record)
    lengths = [len(line.removesuffix(" hello")) for line in capsys.readouterr().err.splitlines()]
    assert lengths == [len("12:03:44"), len("2026-01-31 12:03:44"), len("12:03:44")]
