"""The job: trains a run on its actors, inspects them, replaces the run by another one, and ends the actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from raypar.actors.bounds import Count, NotNegative, Probability, Seed, Steps
from raypar.actors.specs.injected_fault import InjectedFault
from raypar.actors.specs.run import Run
from raypar.actors.specs.sampling import Sampling
from raypar.actors.specs.types import Format
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.cluster.lifecycle.actors import Actors
from raypar.config.arguments import checked_methods
from raypar.job.export import export_hf
from raypar.job.layout.rebalance import Loads
from raypar.job.look.inspection import Inspection
from raypar.job.recover.failures import Failure
from raypar.job.recover.relayout import Relayout
from raypar.job.start.lifetime import Lifetime
from raypar.job.start.resume import Prepared
from raypar.job.start.run_switch import RunSwitch
from raypar.job.stepping.stepper import Stepper
from raypar.job.steps.averages import demand_averages
from raypar.job.steps.displayed import Callback
from raypar.job.text.generation import TextGeneration, request_of
from raypar.job.text.growing_text import Continuation
from raypar.job.text.scoring import Scored, scores
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.record import Record
from raypar.reporting.report import Report
from raypar.reporting.report_table import Reports
from raypar.reporting.summary import job_summary, schedule_text
from raypar.schedules.drawing.notebook import box, text_block
from raypar.schedules.schedule import Schedule


@checked_methods
class Job(Inspection):
    """A run and the actors that train it, which it looks inside. ``launch`` creates it.

    Wrong arguments of methods raise a ConfigError.

    Attributes:
        run: The run that was launched, or that the job was reset to.
        device: The device that the actors compute on: "cpu" or "cuda".
        num_actors: Number of actors, spares among them. A run may use fewer.
        schedule: The schedule of a training step, the same object that is drawn, checked, simulated, stepped and run.
        next_step: Number of the next step, counted from 0: the number of steps taken. Texts count steps from 1.
    """

    def __init__(
        self, checked: Prepared, actors: Actors, name: str, record: Record, chaos: Sequence[InjectedFault] = ()
    ) -> None:
        self.num_actors, lifetime = actors.present, Lifetime(actors, self.close, lambda: self._loop.saver.newest)
        self._loading = RunSwitch(lifetime, actors.device, name, chaos, checked, record)
        self._starter = self._loading.starter
        super().__init__(lifetime, self._loading.loop, actors.device)
        self._loading.start(checked)

    @property
    def run(self) -> Run:
        """The run, with all its replicas, also while it goes on with fewer."""
        return self._starter.run

    @property
    def schedule(self) -> Schedule:
        """The lowered schedule of a training step."""
        return self._loop.loaded.schedule

    @property
    def next_step(self) -> int:
        """The step that is taken next, counted from 0."""
        return self._loop.next_step

    @next_step.setter
    def next_step(self, step: int) -> None:
        self._loop.next_step = step

    @property
    def saved(self) -> Path | None:
        """The newest checkpoint of the run that this job has saved; None before the first."""
        return self._loop.saver.newest

    @property
    def lost(self) -> BaseException | None:
        """Why the checkpoint at the end of the run was not saved; None if it was, or if it is not due yet."""
        return self._loop.saver.lost

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures that this run has survived. After a reset they are those of the new run."""
        return tuple(self._starter.failures.survived)

    def __repr__(self) -> str:
        return f"{self._summary()}\n{schedule_text(self.schedule)}"

    def _repr_html_(self) -> str:
        """Return the job's summary, a table of its actors and a picture of its schedule, for notebooks."""
        return box(text_block(self._summary()), self._actor_table(), self.schedule._repr_svg_() or "")

    # --- training ---

    def step(self) -> Report:
        """Take one compiled training step, a call per actor, and begin the checkpoint that ``run.save_every`` asks for.

        Raises:
            JobError: The step failed, and the job is over.
            NonFiniteError: The gradients are not finite. No weight was changed, and the job can continue.
        """
        return self._loop.step()

    def train(
        self, steps: Steps | None = None, *, on: Callback | Sequence[Callback] | None = None, ahead: Steps | None = None
    ) -> Reports:
        """Train with a progress display, with the evaluations and checkpoints that the run asks for.

        Args:
            steps: Number of steps; None for all that are left of the run.
            on: Called with every report, and with every evaluation that ``run.eval_every`` asks for; or a list of such.
            ahead: How many further steps the actors get before the report of the current one has arrived, so that they
                never wait. What ``on`` fetches may then be that much ahead. None for 0 with ``on``, and 1 without.

        Returns:
            The reports of the steps, a list that shows itself as a table.

        Raises:
            JobError: A step failed, and the job is over.
            NonFiniteError: The gradients are not finite. No weight was changed, and the job can continue.
        """
        return self._loop.train(steps, on, ahead)

    def evaluate(self, steps: Count | None = None, *, ema: bool = False) -> Evaluation:
        """Compute the loss on validation data.

        Args:
            steps: Number of evaluation steps; None for ``run.eval_steps``. In each, every replica evaluates
                ``run.microbatches`` microbatches of its own.
            ema: Whether to use the averages of the weights (``run.ema``). The run's record does not get it then.

        Raises:
            ConfigError: The run has no validation data, or no averages.
            CallError: An exception on actors that live; the job goes on. With ``ema`` it is over.
        """
        return self._loop.evaluate(steps, ema=ema)

    def save(self, folder: str | PathLike[str], keep_last: Count | None = None) -> Path:
        """Save a checkpoint and wait until it is complete on disk.

        Args:
            folder: Folder of checkpoints, in which this one gets a subfolder.
            keep_last: Number of checkpoints to keep with this one: older ones of earlier steps are removed. None: all.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointError: The folder can't be written. The job can continue.
        """
        return self._loop.save(Path(folder), keep_last)

    def export_hf(self, folder: str | PathLike[str], dtype: Format | None = None, *, ema: bool = False) -> Path:
        """Write the model as a folder of Hugging Face, which transformers loads, and return the folder's path.

        Args:
            folder: The folder, a new one, on a file system that all nodes see.
            dtype: Dtype of the weights; None for the one that the run computes in.
            ema: Whether to write the averages of the weights.

        Raises:
            ConfigError: No model of Hugging Face is like this one, or the folder is taken. Lists all faults.
            CheckpointError: The folder can't be written. The job can continue.
        """
        return export_hf(self._loop, folder, dtype, ema=ema)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        max_new_tokens: Count = 64,
        *,
        temperature: NotNegative = 0.0,
        top_k: Count | None = None,
        top_p: Probability = 1.0,
        seed: Seed = 0,
        stop: Sequence[str | int] | None = None,
        on: Callable[[int, int, str], object] | None = None,
        ema: bool = False,
    ) -> list[Continuation]:
        """Go on with prompts, with the present weights: several at a time, with the same tokens on every mesh.

        Args:
            prompts: A text, or several, which begin as the tokenizer begins one, with ``<bos>``, say; or the token ids
                of each, as they are.
            max_new_tokens: The most tokens that each prompt gets. With the prompt they must fit the model's positions.
            temperature: What logits are divided by before one is drawn; 0 takes the likeliest token.
            top_k: Draw only from so many of the likeliest tokens; None: from all.
            top_p: Draw only from the fewest of the likeliest tokens that have this probability together.
            seed: Seed of what is drawn. What is drawn for a prompt depends on this, its number and its position alone.
            stop: Texts and token ids that end a text, without them; None: what the files beside the tokenizer say.
            on: Called with every new token: the number of its prompt, its id, and what it adds to the text. That is ""
                until a character is whole, or while it might be the beginning of a stop.
            ema: Whether to use the averages of the weights, which a run with ``ema`` keeps.

        Returns:
            The continuation of each prompt, in their order.

        Raises:
            ConfigError: The run can't generate, a prompt does not fit, or the memory is too small. Nothing has begun.
            CallError: An exception on actors that live; the job goes on.
            JobError: An actor failed, and the job is over; or the job is generating, or in the middle of a step.
        """
        self._loop.demand_ready()
        if ema:
            demand_averages(self._run)
        every = [prompts] if isinstance(prompts, str) else prompts
        request = request_of(self._run, every, max_new_tokens, Sampling(temperature, top_k, top_p, seed), stop)
        with self._loop.generating("generate", ema=ema):
            return TextGeneration(request, lambda: self._loop.loaded, self._loop.read, ema=ema).run(on)

    def score(self, texts: Sequence[str | Sequence[int]], batch: Count = 4) -> list[Scored]:
        """Score texts with the present weights: several at a time, the same numbers on every mesh but for rounding.

        Args:
            texts: Texts, which begin as the tokenizer begins one, with ``<bos>``, say, or the token ids of each, as
                they are; two tokens at least, and one more than the model's ``seq`` at most.
            batch: The most texts that a stage computes at a time.

        Returns:
            The scores of each text, in their order.

        Raises:
            ConfigError: The run can't score, or a text does not fit. Nothing has begun.
            CallError: An exception on actors that live; the job goes on.
            JobError: An actor failed, and the job is over; or the job is generating, or in the middle of a step.
        """
        self._loop.demand_ready()
        with self._loop.generating("score"):
            return scores(lambda: self._loop.loaded, self._loop.read, texts, batch)

    def stepper(self) -> Stepper:
        """Return a Stepper for the next training step, action by action; the same one if its step has already begun."""
        return self._loop.stepper()

    # --- its life ---

    def reset(
        self, run: Run, *, resume: str | PathLike[str] | VerifiedCheckpoint | None = None, keep_idle: bool = False
    ) -> None:
        """Replace the run by another one on the same actors, which keep their nodes, GPUs and names.

        Args:
            run: The new run. Where it needs more actors, they are started.
            resume: Checkpoint to continue from, as in ``launch``.
            keep_idle: Whether actors that it does not need stay, for a later run that does; else they end, and others
                get their room.

        Raises:
            ConfigError: The run has faults, or there is no room for its actors. The present run goes on unchanged.
        """
        self._loading.replace(run, resume, keep_idle=keep_idle)
        self.num_actors = self._lifetime.actors.present

    def relayout(self, run: Run | None = None, **changes: Any) -> Relayout:
        """Go on with the run in another layout: mesh, ZeRO, precision, schedule. Its state goes from actor to actor.

        Weights, optimizer state and the scale of the loss go straight to the actors that need them, with the fewest
        bytes, and are never whole on one actor or on the disk. The losses that follow are those of the run as it was.

        Args:
            run: The run in the other layout; None for the present one.
            **changes: Fields that differ, such as ``mesh=rp.Mesh(tp=2)``. The number of microbatches follows the mesh.

        Returns:
            What has moved.

        Raises:
            ConfigError: It can't be: lists all faults. Nothing has moved.
            RelayoutLostError: An actor failed. The run goes on in the layout before (``max_failures``).
            JobError: An actor failed, and the job is over; or a step is under way.
        """
        found = self._loading.relayout(run, changes)
        self.num_actors = self._lifetime.actors.present
        return found

    def rebalance(self, loads: Loads | None = None) -> Mapping[str, str]:
        """Move experts with their states between actors, so that each has about as many tokens; return the new order.

        Args:
            loads: Tokens of each expert by the name of their list; None for those of the last step (GPT and Llama).

        Raises:
            ConfigError: Experts are not divided, or their loads are not known. The run goes on unchanged.
        """
        return self._loading.rebalance(loads)

    def close(self) -> None:
        """Finish the save under way; end the actors, and Ray if the launch started it. A second call does nothing."""
        try:
            self._loop.keep_times()
        finally:
            self._lifetime.end(self._loop.close)
            self._starter.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                self._loop.keep(error)
        finally:
            self.close()

    def _summary(self) -> str:
        return job_summary(self._loop.loaded.run, self.device, self.next_step, self._loop.last, self._lifetime.failure)
