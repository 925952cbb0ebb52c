"""Causes: every fault that ends or disturbs a run, with its severity, meaning and remedy.

Exceptions, log records, events.jsonl and status.json contain the id of a cause. Diagnoses and the tables of
docs/reference/faults.md are rendered from this file, so no program parses forge's messages.

    python -m forge.runtime.causes    # print the tables of docs/reference/faults.md
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Severity(IntEnum):
    """The effect of a cause on a run. The worst comes first."""

    ENDS = 0
    STOPS = 1
    COSTS = 2
    NOTE = 3


# Second remedy, shown for every cause that ended a run.
AGAIN = "Start the same command again: it resumes from the newest complete checkpoint."
_ENDS, _STOPS, _COSTS, _NOTE = Severity


class Cause(StrEnum):
    """A kind of fault with a stable id. meaning, remedy: sentences for the user, in Markdown."""

    severity: Severity
    meaning: str
    remedy: str

    def __new__(cls, name: str, severity: Severity, meaning: str, remedy: str) -> Cause:
        cause = str.__new__(cls, name)
        cause._value_ = name
        cause.severity, cause.meaning, cause.remedy = severity, meaning, remedy
        return cause

    @property
    def mark(self) -> dict[str, object]:
        """Return the `extra` argument of a log call that marks the message with this cause."""
        return {"cause": self}

    def of(self, *ranks: int) -> dict[str, object]:
        """Return the `extra` argument of a log call that marks the message with this cause and the ranks at fault."""
        return {"cause": self, "ranks": ranks}

    OUT_OF_MEMORY = (
        *("out_of_memory", _ENDS, "out of memory on a GPU or host"),
        "The log has a memory table, up to three keys to change, and the planned peak with each. Change one of these keys.",
    )
    WATCHDOG = (
        *("watchdog", _ENDS, "a phase exceeded its time limit: a rank hangs, or the limit is too short"),
        "Compare `logs/stacks-rank-R.txt`: the others wait in a collective for the rank that hangs. If none hangs, raise the "
        "key in the message.",
    )
    KILLED = (
        *("killed", _ENDS, "a rank was killed, died or no longer answers"),
        "Look on the node of that rank for exhausted memory (`dmesg`), a GPU fault or a reboot.",
    )
    CONNECTION_LOST = (
        *("connection_lost", _ENDS, "a connection to another rank broke"),
        "If `killed` names a rank, look at its node; else look at the network.",
    )
    RENDEZVOUS_LOST = (
        *("rendezvous_lost", _ENDS, "the process with the rendezvous died: torchrun, or rank 0 under srun"),
        "Look at the first node.",
    )
    ERROR = (
        *("error", _ENDS, "an error in the program"),
        "Read the error of the rank that failed first; the log names its phase and step.",
    )
    COPIES_DIFFER = (
        *("copies_differ", _ENDS, "a bit flipped: copies of a tensor differ. Nothing bad was saved"),
        "The run returns to the checkpoint before the flip. If it happens again, take the named node out of use.",
    )
    BAD_STEPS = (
        *(
            "bad_steps",
            _ENDS,
            "too many bad steps in a row: the run rolls back, or ends after several roll-backs",
        ),
        "Nothing, if it is rare. Else look at the data of these steps (`scripts/inspect_data.py`), lower `optimizer.lr`, or "
        "save more often.",
    )
    DISK_FULL = (
        *("disk_full", _ENDS, "a disk is full, or a quota is used up"),
        "Make room, or lower `checkpoint.keep_last`: the next save first removes old checkpoints. Training continues until "
        "`checkpoint.max_failed_saves` saves in a row have failed.",
    )
    IO_ERROR = (
        *("io_error", _ENDS, "the system could not read or write a file"),
        "Fix the mount, permission or disk named in the message.",
    )
    SAVE_FAILED = (
        *("save_failed", _ENDS, "a save failed; the checkpoints before it are untouched"),
        "The next interval tries again. `checkpoint.max_failed_saves` failures in a row, or a failure of the last save, "
        "end the run. Look at the disk and the mount of the named rank.",
    )
    STORE_FAILED = (
        *("store_failed", _ENDS, "a store refused a request, or did not answer for too long"),
        "Look at its address, credentials and rights. The store is unchanged.",
    )
    NO_CHECKPOINT = (
        *("no_checkpoint", _ENDS, "the run has saved, but no checkpoint is usable; nothing was deleted"),
        "Bring the checkpoints back (a mount, a permission, a copy), or begin a new run. See "
        "Damaged checkpoints in docs/guides/recovery.md.",
    )
    CONFIGURATION = (
        *("configuration", _ENDS, "the configuration or the command line is wrong"),
        "Fix the keys or arguments named in the message.",
    )
    CHANGED_SETTINGS = (
        *("changed_settings", _ENDS, "a key changed that a resume or `checkpoint.init` must not change"),
        "Set it back: `config.toml` in the checkpoint has the old value. Or begin another run with `checkpoint.init`; "
        "list intended changes in `checkpoint.init_changes`.",
    )
    CHANGED_DATA = (
        *("changed_data", _ENDS, "the data or the tokenizer changed since the checkpoint"),
        "Restore them. Or set `checkpoint.allow_changed_data = true`, which accepts other data, but not another tokenizer.",
    )
    DATA = (
        *("data", _ENDS, "the data cannot be used: damaged, too short, or of another tokenizer"),
        "Look at the data with `scripts/inspect_data.py` and `scripts/verify_data.py`, and prepare them again.",
    )
    STOPPED = (
        *("stopped", _STOPS, "the run was asked to stop: by a signal, `resilience.time_limit_s` or a hook"),
        "Start the same command again when you like. A checkpoint was saved, unless the run stopped before its first step.",
    )
    DRAINED = (
        *("drained", _STOPS, "a node left an elastic run because a rank on it stayed slow"),
        "Look at that node; another node can join at any time.",
    )
    FALLBACK = (
        *("fallback", _COSTS, "a damaged checkpoint was renamed; the one before it was used"),
        "Look at the disk: files change only if something is wrong with it. "
        "See Damaged checkpoints in docs/guides/recovery.md.",
    )
    LOCAL_SAVE_FAILED = (
        *("local_save_failed", _COSTS, "a node-local state was not saved; the next interval tries again"),
        "Make room in `checkpoint.local_dir`, or lower `checkpoint.peers`.",
    )
    LOCAL_DAMAGED = (
        *(
            "local_damaged",
            _COSTS,
            "a node-local state was damaged or too large for a node; forge uses a copy or an older state",
        ),
        "If it happens again, look at the memory of that node, or raise `checkpoint.peers`. If a state was too large, make "
        "room in `checkpoint.local_dir`.",
    )
    MIRROR_FAILED = (
        *("mirror_failed", _COSTS, "a copy in `checkpoint.mirror` was not made, or cannot be used"),
        "Look at the store, its address and rights. The checkpoint itself is good, and the next save copies again.",
    )
    SKIPPED = (
        *("skipped", _COSTS, "a step was skipped: its loss or gradient was not finite, or a spike"),
        "Nothing, if it is rare. Parameters and moments are as before.",
    )
    TRANSIENT = (
        *("transient", _COSTS, "a step was skipped; its batch gave finite values when recomputed"),
        "Nothing, if it is rare. Otherwise suspect the node of the rank.",
    )
    DETERMINISTIC = (
        *("deterministic", _COSTS, "a step was skipped; its batch was bad again when recomputed"),
        "Nothing, if it is rare. Otherwise suspect the data of this step or the learning rate.",
    )
    SPIKE = (
        *("spike", _COSTS, "loss or gradient norm is far above the usual"),
        "Nothing, if it is rare; `resilience.spikes` sets the reaction.",
    )
    NODES_CHANGED = (
        *("nodes_changed", _COSTS, "nodes of an elastic run were lost, or joined"),
        "Nothing: the run continues with the present nodes.",
    )
    SIDE_SYSTEM = (
        *("side_system", _COSTS, "an evaluation, sample, tracker, profile or log file failed"),
        "Training continues without it. Fix it before the next start.",
    )
    LINES_LOST = (
        *("lines_lost", _COSTS, "lines of metrics.jsonl or events.jsonl are missing or damaged"),
        "Nothing, after a crash of the machine; the checkpoint is whole. Else look at the disk.",
    )
    NOT_WRITTEN = (
        *("not_written", _COSTS, "lines or a status could not be written; they wait in memory"),
        "Make room on the disk of the run directory, or look at its mount.",
    )
    NOT_REMOVED = (
        *("not_removed", _COSTS, "an old checkpoint, state, copy or leftover could not be removed"),
        "Look at its permissions and whether a process has it open. Every save tries again.",
    )
    STRAGGLER = (
        *(
            "straggler",
            _NOTE,
            "all ranks wait for a slow rank, in `data`, `forward` or `optimizer`",
        ),
        "Look for a hot GPU, a busy node or a slow disk. The results are still correct.",
    )
    DATA_STALL = (
        *("data_stall", _NOTE, "training waits for data of a store"),
        "Look at the store and the network, or raise `data.prefetch`.",
    )
    LEFTOVER = (
        *("leftover", _NOTE, "the leftover of a killed save was removed"),
        "Nothing.",
    )
    SET_ASIDE = (
        *(
            "set_aside",
            _NOTE,
            "the run begins a new history, or continues from an older step: later files were renamed",
        ),
        "Nothing. `.aside-step-N` is yours to delete.",
    )
    NOTE = (
        *("note", _NOTE, "a note on a setting, a source, a store, a lock or a copy"),
        "Read the message. Nothing, if you expected it.",
    )


CAUSES = {cause.value: cause for cause in Cause}
_TITLES = (
    *("Causes that can end a run", "Stops on request", "Causes that cost something while training continues"),
    "Notes",
)


def tables() -> str:
    """Return the tables of docs/reference/faults.md, with a section for each severity."""
    text = ""
    for severity, title in zip(Severity, _TITLES, strict=True):
        text += f"### {title}\n\n| cause | meaning | what to do |\n|---|---|---|\n"
        for cause in Cause:
            text += f"| `{cause}` | {cause.meaning} | {cause.remedy} |\n" * (cause.severity is severity)
        text += "\n"
    return text


if __name__ == "__main__":
    print(tables(), end="")
