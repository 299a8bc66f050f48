"""Registry: which fault scenario proves each row of the tables that promise something.

A scenario names its row by the first cell, the kinds of faults in it, and the tests that inject them. Rows whose own
last cell names tests ("tested by") need none here. `tests/project/test_scenarios.py` fails when a row has no scenario,
when a scenario has no row, and when a test does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.kinds import Kind


@dataclass(frozen=True)
class Scenario:
    """Proof of a row.

    Attributes:
        row: first cell of the row.
        kinds: the faults in it.
        tests: ids of tests, below tests/.
    """

    row: str
    kinds: tuple[Kind, ...]
    tests: tuple[str, ...]


def _in(path: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{path}.py::{name}" for name in names)


def _row(row: str, kinds: Kind | tuple[Kind, ...], *tests: tuple[str, ...]) -> Scenario:
    return Scenario(row, kinds if isinstance(kinds, tuple) else (kinds,), sum(tests, ()))


_KILLS, _RUNS = "trainings/test_engine_kills", "trainings/test_engine_runs"
_TRAININGS, _DDP = "trainings/test_engine_trainings", "trainings/test_ddp"
_STORAGE, _PEERS = "storage/test_storage_runs", "replication/test_peers_runs"
_LIGHTNING, _ACCELERATE = "adapters/test_lightning_exact", "adapters/test_accelerate_exact"
_CHANGES = "trainings/test_what_changes"
_ANY_NODE = _in(_PEERS, "test_goes_on_from_peers_when_nodes_are_lost")
_EXACT = _in(_TRAININGS, "test_lazy_redo_is_exact", "test_eager_redo_is_exact")
_FRAMEWORKS = _in(_LIGHTNING, "test_each_feature") + _in(_ACCELERATE, "test_each_feature")

LOST = (
    _row(
        "trainer: exception, any signal, out of memory, segmentation fault",
        (Kind.KILL_TRAINER, Kind.STOP_TRAINER),
        _in(_KILLS, "test_a_kill_anywhere_in_a_step_loses_only_what_was_not_committed"),
        _in("trainings/test_engine_leftovers", "test_an_exception_in_training_keeps_the_state"),
    ),
    _row(
        "one rank, several, or all, on one node or more",
        (Kind.KILL_TRAINER, Kind.KILL_TRAINERS),
        _in(
            "trainings/test_sharded",
            "test_resumes_exactly_wherever_a_rank_dies",
            "test_resumes_exactly_on_several_nodes",
        ),
        _in("trainings/test_sharded", "test_resumes_exactly_after_the_death_of_all_ranks"),
    ),
    _row(
        "trainer, if the state is captured every N steps",
        Kind.KILL_TRAINER,
        _in("capture/test_capture", "test_capture_as_configured"),
        _in("capture/test_capture_ddp", "test_ranks_that_differ_by_a_capture_go_back_to_a_common_one"),
    ),
    _row(
        "all ranks of a node, just after ranks that share an average or a large buffer began to differ in it",
        Kind.KILL_TRAINERS,
        _in("capture/test_by_value_once", "test_ranks_that_disagree_cost_nothing_that_could_be_restored"),
        _in("capture/test_by_value_once_runs", "test_a_bit_that_flips_on_one_rank_is_that_rank_s_own"),
    ),
    _row(
        "trainer, while it restores",
        Kind.KILL_RESUMING,
        _in(_KILLS, "test_a_kill_during_a_restore_is_harmless", "test_a_kill_in_the_middle_of_lazy_redo_is_harmless"),
    ),
    _row(
        "trainer, before its first commit",
        Kind.KILL_TRAINER,
        _in(_KILLS, "test_a_kill_before_anything_is_committed_starts_over"),
    ),
    _row(
        "agent",
        Kind.KILL_AGENT,
        _in(_KILLS, "test_training_survives_its_agent_and_is_protected_again"),
        _in(_KILLS, "test_nothing_is_held_when_agent_and_trainer_die"),
    ),
    _row(
        "agent that is stopped, not dead",
        (Kind.STOP_AGENT, Kind.GARBAGE_TO_AGENT),
        _in(
            "agent/test_agent_stopped",
            "test_training_goes_on_without_a_stopped_agent_and_with_it_when_it_goes_on",
            "test_an_agent_that_dies_meanwhile_is_replaced_at_once",
        ),
    ),
    _row(
        "no new agent can be started",
        Kind.KILL_AGENT,
        _in(_KILLS, "test_steps_without_protection_are_counted"),
        _in("agent/test_agent_stopped", "test_attempts_that_fail_come_ever_more_seldom_and_what_they_cost_counts"),
    ),
    _row(
        "up to m whole nodes of a group: trainers, agents, memory (peers)",
        (
            Kind.LOSE_NODE,
            Kind.KILL_REPLICATOR,
            Kind.STOP_REPLICATOR,
            Kind.DAMAGE_FRAGMENTS,
            Kind.CUT_NETWORK,
            Kind.SLOW_LINK,
            Kind.GARBAGE_TO_REPLICATOR,
        ),
        _ANY_NODE,
        _in(
            "replication/test_peers_agents_runs",
            "test_what_was_on_its_way_may_be_lost_and_nothing_that_was_acknowledged",
        ),
        _in("replication/test_peers_recovery_runs", "test_damaged_fragments_are_decoded_around"),
        _in("replication/test_peers_cadence_runs", "test_a_node_is_lost_that_could_not_send_every_record"),
        _in("replication/test_peers_network_runs", "test_a_node_that_was_given_up_and_comes_back_changes_nothing"),
        _in("replication/test_peers_fuzz", "test_bytes_of_garbage", "test_frames_of_garbage"),
    ),
    _row(
        "more nodes, or another one before protection is complete again",
        Kind.LOSE_NODES,
        _in(
            _PEERS,
            "test_falls_to_storage_when_more_nodes_are_lost_than_tolerated",
            "test_falls_to_storage_when_a_second_node_is_lost_before_protection_is_whole",
        ),
    ),
    _row(
        "agent and trainer of one node together, without peers",
        (Kind.LOSE_NODE, Kind.DAMAGE_STORED),
        _in(_STORAGE, "test_agent_and_trainer_die_together_and_training_resumes_from_storage"),
        _in(_STORAGE, "test_a_damaged_checkpoint_is_named_and_the_one_before_is_used"),
    ),
    _row(
        "the machine, the container with both, the cgroup with both, without peers",
        Kind.LOSE_NODES,
        _in("trainings/test_sharded", "test_resumes_from_storage_when_agents_and_all_ranks_are_gone"),
        _in("agent/test_service", "test_a_run_under_the_shipped_unit_goes_on_from_memory_then_from_storage"),
    ),
    _row(
        "SIGTERM to the agent (a preemption)",
        Kind.TERMINATE_AGENT,
        _in(
            "storage/test_ending_agent",
            "test_an_agent_that_is_told_to_end_saves_first_and_training_goes_on",
            "test_a_start_waits_for_an_agent_that_still_writes_what_it_holds",
        ),
    ),
    _row(
        "no trainer comes back within `linger_seconds` (default 30 minutes)",
        Kind.KILL_TRAINERS,
        _in(_STORAGE, "test_what_a_dead_trainer_left_in_memory_goes_to_storage"),
        _in(
            "agent/test_lifetime",
            "test_what_trainers_leave_is_saved_and_lingering_ends_when_it_is_saved_without_a_turn_in_between",
        ),
    ),
    _row(
        "`memckpt stop`",
        Kind.TERMINATE_AGENT,
        _in("trainings/test_engine_leftovers", "test_an_agent_that_is_told_to_leave_leaves_nothing"),
    ),
)

EXACT = (
    _row("parameters, frozen ones too; `requires_grad`", Kind.KILL_TRAINER, _EXACT, _FRAMEWORKS),
    _row(
        "optimizer state, its types, its order; groups with all hyperparameters",
        Kind.KILL_TRAINER,
        _in("state/test_engine_optimizers", "test_lazy_redo_is_exact", "test_eager_redo_is_exact"),
    ),
    _row(
        "which parameters have a gradient between two steps, and its values where up to 64 KiB of gradients are there, "
        "or where they are neither dropped nor zeroed before the next backward",
        Kind.KILL_TRAINER,
        _in("capture/test_pending", "test_gradients_of_zeros_are_zeros_after_a_resume"),
        _in(_CHANGES, "test_gradients_that_nobody_zeroes"),
    ),
    _row(
        "buffers and parameters, also replaced, resized, tied or late ones in modules that a new process has; averaged "
        "models outside the model",
        Kind.KILL_TRAINER,
        _EXACT,
        _in(_CHANGES, "test_what_changes_while_training_runs"),
        _in("capture/test_by_value_ring", "test_an_average_survives_kills_anywhere"),
    ),
    _row(
        "modules' training flags, numbers of torch's own modules (`Dropout.p`), extra state, generators in attributes; "
        "`requires_grad` of every parameter",
        Kind.KILL_TRAINER,
        _in(_CHANGES, "test_what_changes_while_training_runs"),
    ),
    _row(
        "generators, and objects with `state_dict()` and `load_state_dict()`, on the model and its modules",
        Kind.KILL_TRAINER,
        _in("adapters/test_lightning_programs", "test_as_if_never_killed"),
    ),
    _row(
        "global generators of torch, numpy, Python; of CUDA (current device)",
        Kind.KILL_TRAINER,
        _EXACT,
        _in("state/test_generators", "test_generators_repeat_after_restore"),
    ),
    _row("the loss of every later step", Kind.KILL_TRAINER, _EXACT, _FRAMEWORKS),
    _row("LR schedulers, gradient scaler", Kind.KILL_TRAINER, _EXACT, _FRAMEWORKS),
    _row(
        "data position, workers' generators, and those of everything below dataset, samplers and collate function: "
        "transforms, lists, what functions name (made at once, or with the first sample)",
        Kind.KILL_TRAINER,
        _in("dataloader/test_data_position", "test_a_chain_of_killed_runs_sees_what_one_ungrafted_run_sees"),
        _in("trainings/test_hand_loops", "test_a_loop_over_epochs"),
    ),
    _row(
        "loops' counters, an owed validation, an owed end of epoch",
        Kind.KILL_TRAINER,
        _in(_LIGHTNING, "test_one_run_killed_at_every_point"),
        _in(_ACCELERATE, "test_one_run_killed_at_every_point"),
        _in("trainings/test_hand_loops", "test_a_loop_over_epochs"),
    ),
    _row("state of callbacks, module and datamodule hooks", Kind.KILL_TRAINER, _in(_LIGHTNING, "test_each_feature")),
    _row(
        "epoch aggregates of `self.log`, torchmetrics, `callback_metrics`",
        Kind.KILL_TRAINER,
        _in(_LIGHTNING, "test_one_run_killed_at_every_point", "test_each_feature_killed_all_along"),
    ),
)
HARDWARE = (
    _row("CPU, fp32 or fp64", Kind.KILL_TRAINER, _EXACT),
    _row(
        "CPU, bf16 or fp16 parameters",
        Kind.KILL_TRAINER,
        _in(_TRAININGS, "test_gradients_of_another_dtype_than_their_parameters"),
        _in("recovery/test_redo_threads", "test_threads_change_no_bit"),
    ),
    _row("any", Kind.KILL_TRAINER, _in("capture/test_capture", "test_capture_as_configured")),
    _row(
        "CUDA",
        Kind.KILL_TRAINER,
        _in("gpu/test_exact", "test_a_killed_training_resumes_at_its_bits"),
        _in("capture/test_copier", "test_lazy"),
    ),
)
COMPRESSED = (
    _row(
        "`HalfPrecision`, or `error_feedback=False`",
        Kind.KILL_TRAINER,
        _in("trainings/test_compression", "test_resumes_exactly_after_the_death_of_ranks"),
    ),
    _row(
        '`residual="keep"`, and `"auto"` without peers and with `storage.mode` other than `"log"`',
        (Kind.KILL_TRAINER, Kind.LOSE_NODE),
        _in(
            "trainings/test_compression",
            "test_resumes_exactly_after_the_death_of_ranks",
            "test_resumes_exactly_from_the_log",
            "test_resumes_exactly_from_peers",
        ),
    ),
    _row(
        '`residual="drop"`, and `"auto"` otherwise',
        Kind.KILL_TRAINER,
        _in("trainings/test_compression", "test_what_was_dropped_is_said"),
    ),
)

_BY_HAND = _in(_RUNS, "test_a_change_by_hand_is_noticed_at_once_and_reported")
_FAULTS_NAMED = _in("recovery/test_resume_check", "test_each_fault_is_named_and_training_goes_on_from_what_was_held")
DETECTED = (
    _row(
        "gradients changed between backward and step in an unknown way (own clipping, noise)",
        Kind.SCRIPT,
        _in(
            _TRAININGS,
            "test_changes_of_gradients_that_streaming_does_not_know_are_noticed",
            "test_own_clipping_is_noticed_on_the_first_logged_record",
        ),
    ),
    _row(
        "parameters, or tensors of an optimizer's state, changed by anything but a step of their optimizer: also "
        "between backward and step, in hooks, between two optimizers' steps",
        Kind.SCRIPT,
        _BY_HAND,
    ),
    _row(
        "the same in too few elements for the sample, or optimizer state changed through `.data`; or whatever else "
        "redo does not know of",
        Kind.SCRIPT,
        _in(
            _RUNS, "test_the_audit_finds_what_version_counters_do_not_show", "test_lazy_anchors_heal_within_one_period"
        ),
        _in("trainings/test_audit", "test_a_fault_is_found_within_two_periods_and_resumes_are_exact_again"),
    ),
    _row(
        "an optimizer whose step depends on more than gradients, groups and state",
        Kind.SCRIPT,
        _in("capture/test_capture", "test_what_an_optimizer_hides_is_found_and_captured"),
        _in("capture/test_self_test", "test_what_cannot_be_redone_is_found"),
    ),
    _row(
        "attributes and state of an optimizer that can be neither copied nor encoded; a module removed while training "
        "runs",
        Kind.SCRIPT,
        _in("capture/test_capture", "test_what_an_optimizer_hides_is_found_and_captured"),
    ),
    _row(
        "an optimizer that `attach()` was not given; a scheduler of torch that was not registered",
        Kind.SCRIPT,
        _in(_CHANGES, "test_what_changes_while_training_runs"),
        _in("session/test_rank_state", "test_a_run_that_is_not_exact_says_so_once_and_hands_it_on"),
    ),
    _row(
        "plain attributes that hooks change and no `state_dict()` contains",
        Kind.SCRIPT,
        _in("recovery/test_resume_witness", "test_it_finds_a_plain_attribute_that_is_used_in_forward"),
    ),
    _row(
        "large buffers and frozen parameters that change",
        Kind.SCRIPT,
        _in(_TRAININGS, "test_frozen_tensors_that_are_written_behind_the_counters_back"),
    ),
    _row(
        "an attribute that a dataset reads and that changes within an epoch, named in `attributes` or not: loaders "
        "read ahead of training, and workers hold copies",
        Kind.SCRIPT,
        _in("dataloader/test_data_lookahead", "test_without_lookahead_what_was_read_ahead_is_something_else"),
        _in("recovery/test_resume_witness", "test_it_says_different_where_a_fault_reaches_a_gradient"),
    ),
    _row(
        "a sampler that does not repeat its indices",
        Kind.SCRIPT,
        _in("dataloader/test_data_position", "test_other_data_is_found_out"),
    ),
    _row(
        "an own `__iter__`, `in_order=False`, `SystemRandom`, a sampler that keeps too much state or draws too often, "
        "a number that a dataset counts",
        Kind.SCRIPT,
        _in(
            "dataloader/test_data_position",
            "test_reasons_against_a_loader",
            "test_a_sampler_that_draws_too_often_between_the_steps_is_said",
        ),
    ),
    _row(
        "a stream that gives other samples when it is read again",
        Kind.SCRIPT,
        _in("trainings/test_hand_loops", "test_a_stream_that_is_another_when_it_is_read_again_is_told"),
    ),
    _row(
        "state that the safe codec does not take",
        Kind.SCRIPT,
        _in("trainings/test_engine_leftovers", "test_state_that_cannot_be_stored_safely_is_named"),
    ),
    _row(
        "Trainer arguments that differ from the killed attempt's",
        Kind.SCRIPT,
        _in("adapters/test_transformers", "test_a_finished_training_is_at_its_end_and_can_be_made_longer"),
    ),
    _row(
        "another model or optimizer class",
        Kind.SCRIPT,
        _in(_RUNS, "test_another_model_or_optimizer_is_refused_and_the_first_difference_named"),
    ),
    _row(
        "an incomplete record",
        Kind.KILL_TRAINER,
        _in("agent/test_agent_parts", "test_a_slot_that_is_not_sealed_is_not_read"),
    ),
    _row("a step without protection", Kind.KILL_AGENT, _in(_KILLS, "test_steps_without_protection_are_counted")),
    _row(
        "DDP with three ranks or more, killed after the very first step",
        Kind.KILL_TRAINER,
        _in(_DDP, "test_the_second_step_of_three_ranks_is_not_repeated"),
    ),
    _row(
        "anything that was not restored and affects a gradient: other data, a lost generator, a plain attribute, a bit "
        "of a parameter",
        Kind.SCRIPT,
        _in("recovery/test_resume_witness", "test_it_says_different_where_a_fault_reaches_a_gradient"),
    ),
)
VERDICTS = (
    _row("*equal*", Kind.KILL_TRAINER, _EXACT),
    _row(
        "*rounding*",
        Kind.KILL_TRAINER,
        _in("recovery/test_resume_check", "test_rounding_is_for_accelerators_and_for_tensors"),
    ),
    _row("*different*", Kind.SCRIPT, _FAULTS_NAMED),
    _row(
        "*equal*, with `no step was compared`",
        Kind.KILL_TRAINER,
        _in("recovery/test_resume_check", "test_where_no_step_can_be_repeated_the_line_says_why"),
    ),
)

MODES = (
    _row(
        '`"replica"`',
        Kind.LOSE_NODE,
        _in(_STORAGE, "test_agent_and_trainer_die_together_and_training_resumes_from_storage"),
    ),
    _row(
        '`"log"`',
        (Kind.LOSE_NODE, Kind.DAMAGE_STORED, Kind.DISK_SLOW),
        _in("storage/test_storage_log", "test_a_node_dies_and_training_goes_on_behind_the_last_batch"),
        _in("storage/test_storage_log", "test_a_damaged_batch_is_named_and_the_step_before_it_is_used"),
        _in("storage/test_storage_live", "test_killed_at_random_no_more_is_lost_than_status_said"),
    ),
    _row(
        '`"auto"` (default)',
        (Kind.KILL_WRITER, Kind.DISK_FULL, Kind.DISK_ERRORS),
        _in("storage/test_storage_chain", "test_records_are_logged_where_they_are_small"),
        _in("storage/test_storage_failures", "test_a_full_disk_raises_an_alarm_and_is_used_again_once_there_is_room"),
        _in("storage/test_storage_failures", "test_a_writer_that_is_killed_is_followed_by_another_and_leaves_nothing"),
        _in("storage/test_storage_medium", "test_an_error_that_the_medium_reports_early_is_not_lost"),
    ),
)

#: By page and heading, one tuple of scenarios for each table under it.
SCENARIOS: dict[tuple[str, str], tuple[tuple[Scenario, ...], ...]] = {
    ("guarantees.md", "What can be lost"): (LOST,),
    ("guarantees.md", 'What "exact" covers'): (EXACT, HARDWARE, COMPRESSED),
    ("guarantees.md", "What is detected and reported, where it cannot be exact"): (DETECTED,),
    ("guarantees.md", "What a resume check proves"): (VERDICTS,),
    ("storage.md", "Two modes"): (MODES,),
}

_REFUSED = _in("trainings/test_sharded_refusals", "test_refused")
SCENARIOS["sharding.md", "What is refused, by name"] = (
    (
        _row(
            "pipeline stages (`torch.distributed.pipelining`), meshes that do not cover all ranks",
            Kind.SCRIPT,
            _REFUSED,
        ),
        _row("local SGD (`PostLocalSGDOptimizer`, the communication hook)", Kind.SCRIPT, _REFUSED),
        _row("DDP's `join` with uneven inputs", Kind.SCRIPT, _REFUSED),
        _row(
            "`compression`, with FSDP1, FSDP2 and HSDP",
            Kind.SCRIPT,
            _in("trainings/test_compression_refusals", "test_models_that_compression_is_not_for"),
        ),
        _row("DDP around sharded parameters", Kind.SCRIPT, _REFUSED),
        _row("`Partial` placements of parameters", Kind.SCRIPT, _REFUSED),
        _row(
            "FSDP1 over a part of the ranks, beside DTensors, or without its outermost wrapper",
            Kind.SCRIPT,
            _in("trainings/test_fsdp1", "test_a_module_without_its_wrapper_is_refused"),
        ),
        _row(
            "FSDP1 with another number of ranks, or another wrapping",
            Kind.SCRIPT,
            _in("trainings/test_fsdp1", "test_another_number_of_ranks_is_refused_with_the_remedy"),
        ),
    ),
)

_POLICY = "supervision/test_policy"
SCENARIOS["restart.md", "What it does at an end"] = (
    (
        _row(
            "exit status 0", Kind.SCRIPT, _in(_POLICY, "test_status_0_is_the_end_and_so_is_a_signal_that_asks_for_it")
        ),
        _row(
            "an error: another status, or a signal such as SIGSEGV or SIGABRT",
            Kind.KILL_TRAINER,
            _in(_POLICY, "test_an_error_that_repeats_at_the_same_step_is_not_tried_again"),
            _in(
                "supervision/test_run", "test_a_training_that_fails_goes_on_at_its_step_and_ends_as_if_nothing_had_been"
            ),
        ),
        _row(
            "a kill from outside (SIGKILL, the OOM killer)",
            Kind.KILL_TRAINER,
            _in(_POLICY, "test_other_ends_are_followed_by_a_restart"),
        ),
        _row(
            "any end, after SIGTERM, SIGINT, SIGHUP or SIGQUIT to `memckpt run`",
            Kind.KILL_TRAINER,
            _in("supervision/test_run", "test_a_signal_is_passed_on_and_ends_restarts"),
        ),
        _row(
            "any failure, after `--restarts N` restarts (default 100)",
            Kind.KILL_TRAINER,
            _in(_POLICY, "test_restarts_have_a_limit"),
        ),
    ),
)

_MEANS = _in("storage/test_storage_owner", "test_a_lost_run_directory_takes_one_setting_once")
SCENARIOS["storage.md", "Whose a store is"] = (
    (
        _row(
            "two runs with one `storage.url`",
            Kind.SCRIPT,
            _in("storage/test_storage_owner", "test_two_runs_with_one_storage_keep_apart"),
        ),
        _row("the store, and no run directory (a new machine)", Kind.LOSE_NODES, _MEANS),
        _row(
            "run directories that do not outlive a node",
            Kind.LOSE_NODE,
            _in("storage/test_storage_owner", "test_a_run_with_a_name_needs_no_run_directory"),
        ),
        _row(
            "nodes that do not share a run directory",
            Kind.SCRIPT,
            _in("storage/test_storage_owner", "test_nodes_agree_on_the_run"),
        ),
        _row(
            "a run directory that was moved, with `storage` in it",
            Kind.SCRIPT,
            _in("storage/test_storage_owner", "test_a_run_that_was_moved_goes_on_with_its_agent"),
        ),
        _row(
            "a copy of a run directory",
            Kind.SCRIPT,
            _in("storage/test_storage_owner", "test_a_copy_of_a_run_trains_for_itself"),
        ),
        _row(
            "a store that was copied or moved, and another run directory",
            Kind.SCRIPT,
            _in("storage/test_storage_owner", "test_a_new_directory_adopts_a_store_with_one_flag"),
        ),
        _row(
            "`RUN/storage`, and no `run.json`",
            Kind.SCRIPT,
            _in("storage/test_storage_owner", "test_what_lies_in_the_run_directory_is_the_run_s_own"),
        ),
        _row(
            "a run directory with `run.json`, and no store, or an empty one",
            Kind.SCRIPT,
            _in("storage/test_storage_away", "test_a_run_whose_store_is_away_does_not_start_over"),
        ),
        _row(
            "a store of a version before there were ids",
            Kind.SCRIPT,
            _in("storage/test_storage_owner", "test_a_store_without_an_owner_becomes_that_of_the_first_who_comes"),
        ),
    ),
)
