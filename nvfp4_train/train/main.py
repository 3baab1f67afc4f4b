"""From a configuration to a finished run."""

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from nvfp4_train.config.load import LoadedConfig, load_yaml
from nvfp4_train.engine.build import prepare_model
from nvfp4_train.parallel.mesh import build_mesh
from nvfp4_train.parallel.pipeline import check_microbatches
from nvfp4_train.parallel.runtime import Runtime, start_runtime, stop_runtime
from nvfp4_train.train.failure import EXIT_RUN, USER_FACING, FailedElsewhereError, report_failure
from nvfp4_train.train.job import Job
from nvfp4_train.train.pace import Pace
from nvfp4_train.train.resume import Request, Start, decide_start
from nvfp4_train.train.run_folder import RunFolder

EXIT_SIGNAL = 128


def main(loaded: LoadedConfig, *, report: Callable[[Path], str]) -> int:
    """Train as configured.

    Args:
        loaded: The run.
        report: Summarizes a run folder for the user; called on rank 0 when the run has come to its end.

    Returns:
        Exit code: 0 for a run that ended, 1 for one that failed, 2 for a wrong configuration, 128 plus the number of
        the signal that stopped it.
    """
    rank = 0
    try:
        with ExitStack() as stack:
            runtime = start_runtime(loaded.cfg.run.device)
            stack.callback(stop_runtime)
            rank = runtime.rank
            return _run(_prepare(loaded, runtime=runtime, stack=stack), report=report)
    except USER_FACING as error:
        return report_failure(error, rank=rank)
    except FailedElsewhereError:
        return EXIT_RUN
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was saved after the last checkpoint\n")
        return EXIT_SIGNAL + 2


def _prepare(loaded: LoadedConfig, *, runtime: Runtime, stack: ExitStack) -> Job:
    """Check and decide everything that needs no data and no memory; ``stack`` keeps the run folder locked."""
    cfg = loaded.cfg
    mesh = build_mesh(cfg.parallel, runtime)
    mesh.check_batch(cfg.batch)
    check_microbatches(cfg.batch, cfg.parallel, mesh)
    prepared = prepare_model(cfg.model, cfg.recipe, seed=cfg.run.seed)
    folder = RunFolder(Path(cfg.run.dir) / cfg.run.name)
    start = _agree_on_start(loaded, folder=folder, runtime=runtime, stack=stack)
    pace = Pace(
        run=cfg.run,
        batch=cfg.batch,
        scheduler=cfg.scheduler,
        optimizer=cfg.optimizer,
        evaluation_interval=cfg.evaluation.interval_steps,
    )
    return Job(loaded=loaded, runtime=runtime, mesh=mesh, prepared=prepared, folder=folder, start=start, pace=pace)


def _agree_on_start(loaded: LoadedConfig, *, folder: RunFolder, runtime: Runtime, stack: ExitStack) -> Start:
    """Let rank 0 look at the disk, so that all ranks start from the same checkpoint and one of them complains."""
    request = Request(resume=loaded.cfg.resume, mode=loaded.cfg.resume_mode, config=load_yaml(loaded.yaml))
    start: Start | None = None
    failure: Exception | None = None
    if runtime.is_main:
        try:
            stack.enter_context(folder.lock())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                start = decide_start(request, folder=folder)
            sys.stderr.writelines(f"warning: {warning.message}\n" for warning in caught)
        except USER_FACING as error:
            failure = error
    start = runtime.share(start)
    if failure is not None:
        raise failure
    if start is None:
        raise FailedElsewhereError
    return start


def _run(job: Job, *, report: Callable[[Path], str]) -> int:
    job.announce()
    if not job.is_over:
        received = job.train()
        if received is not None:
            return EXIT_SIGNAL + received
    if job.runtime.is_main:
        job.say(report(job.folder.path))
    return 0
