"""What runs on threads make of a folder of Hugging Face, beside what transformers makes of it."""

from __future__ import annotations

import copy
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

import raypar as rp
from raypar.actors.hugging_face.conversions import converted
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.checkpoint.hugging_face import export
from raypar.job.text.scoring import scores
from tests.support.generation import TeamGeneration
from tests.support.hugging_face import checkpoint_of, random_model
from tests.support.tiny_models import SEQ

MICROBATCHES = 4  # of a step, over all replicas
LENGTHS = (SEQ + 1, 5, 9, 2, 7, SEQ)  # tokens of the texts that are scored
LOGS, GRADIENT, TIMES = 2e-5, 1e-4, 3.0
ROUNDING = 1e-7  # of the largest gradient of all: a tensor without one has that of rounding errors
_SAME = {"gelu_new": "gelu_pytorch_tanh", "swish": "silu"}  # activations of two names
LAYOUTS = {
    "one": (rp.Mesh(), {}),
    "pp 2": (rp.Mesh(pp=2), {}),
    "tp 2": (rp.Mesh(tp=2), {}),
    "zero 3": (rp.Mesh(dp=2), {"zero": 3}),
    "cp 2": (rp.Mesh(cp=2), {}),
    "ep 2": (rp.Mesh(dp=2, ep=2), {}),
}


def batch_of(vocab):
    """Batches of two samples, of which other numbers of tokens count in each microbatch, whatever the replicas."""

    def batch(number):
        generator = torch.Generator().manual_seed(number)
        ids, labels = (torch.randint(vocab, (2, SEQ), generator=generator) for _ in range(2))
        labels.view(-1)[(24, 5, 13, 1)[number % 4] :] = -100
        return ids, labels

    return batch


def texts_of(vocab, most):
    """Texts of several lengths, of so many tokens at the most."""
    generator = torch.Generator().manual_seed(99)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in LENGTHS if length <= most]


class Wanted(NamedTuple):
    """What transformers makes of a model: log-probabilities by text, loss, gradients by name of the folder."""

    logs: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


def wanted(model, batches, texts, **how):
    """Compute what transformers makes of a model, of each text alone and in a fresh module.

    ``how`` a folder is saved: gradients have the names of its tensors.
    """
    logs, total = [], sum(int((labels != -100).sum()) for _, labels in batches)
    gradients = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for text in texts:
        with torch.no_grad():
            made = copy.deepcopy(model)(torch.tensor([text[:-1]]), use_cache=False).logits[0].double().log_softmax(-1)
        logs.append(made.gather(1, torch.tensor(text[1:])[:, None])[:, 0])
    loss = 0.0
    for ids, labels in (sample for batch in batches for sample in zip(*batch, strict=True)):
        fresh = copy.deepcopy(model)
        part = cross_entropy(fresh(ids[None], use_cache=False).logits[0], labels, reduction="sum") / total
        part.backward()
        loss += part.item()
        for name, one in fresh.named_parameters():
            if one.grad is not None:
                gradients[name] += one.grad
    return Wanted(logs, loss, _named_as_in_a_folder(model, gradients, **how))


def _named_as_in_a_folder(model, tensors, **how):
    """Tensors by names of parameters, as save_pretrained writes them in a folder."""
    whole = copy.deepcopy(model)
    for name, one in whole.named_parameters():
        one.data = tensors[name]
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder, **how)
        return tensors_of(folder)


def tensors_of(folder):
    """All tensors in a folder."""
    from safetensors.torch import load_file

    return {name: one for file in sorted(Path(folder).glob("*.safetensors")) for name, one in load_file(file).items()}


@dataclass
class Outcome:
    """How far a model is from transformers.

    Attributes:
        accepted: Names of the layouts that were compared.
        refused: Why others were refused, by layout.
        wrong: What differs, a line each.
        logs: The largest distance of a log-probability.
        gradient: That of a gradient, by the largest one of its tensor.
    """

    accepted: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    logs: float = 0.0
    gradient: float = 0.0


def compared(tiny, folder, layouts=LAYOUTS):
    """Compare a tiny model on each layout.

    Args:
        tiny: The model.
        folder: An empty folder for files.
        layouts: Mesh and settings by name.
    """
    return Comparison(tiny, Path(folder)).outcome(layouts)


class Comparison:
    """A tiny model, its folder, and what transformers makes of it."""

    def __init__(self, tiny, folder):
        self.tiny, self.home = tiny, folder
        self.folder = folder / "theirs"
        self.model = _exact_norms(random_model(tiny.config, tiny.fields, tiny.seed), tiny.kind)
        self.model.save_pretrained(self.folder, max_shard_size="4KB", save_original_format=not tiny.is_renamed)
        vocab = self.model.config.vocab_size
        self.batch = batch_of(vocab)
        self.found = Outcome()

    def outcome(self, layouts):
        try:
            spec = rp.HF(self.folder, seq=SEQ)
        except rp.ConfigError as error:
            self.found.refused = dict.fromkeys(layouts, "; ".join(error.faults))
            return self.found
        self._expect(spec)
        for name, (mesh, settings) in layouts.items():
            run = self._accepted(name, spec, mesh, settings)
            if run is None:
                continue
            self.found.accepted.append(name)
            try:
                self._compare(name, run)
            except Exception as error:
                self._note(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return self.found

    def _expect(self, spec):
        """Compute what is right."""
        scaling = getattr(spec, "rope_scaling", None)
        most = scaling.trained + 1 if scaling is not None and scaling.kind == "dynamic" else SEQ + 1
        self.texts = texts_of(spec.vocab, min(most, SEQ + 1))
        batches = [self.batch(number) for number in range(MICROBATCHES)]
        how = {"save_original_format": not self.tiny.is_renamed}
        self.theirs = wanted(self.model, batches, self.texts, **how)
        self.exact = wanted(copy.deepcopy(self.model).double(), batches, self.texts, **how)

    def _accepted(self, name, spec, mesh, settings):
        """The run on a layout, with the first kind of context that is accepted; None if none is."""
        microbatches = MICROBATCHES // mesh.dp
        data = rp.Batches(lambda step, microbatch, dp: self.batch(microbatch * mesh.dp + dp))
        faults = []
        for context in ("ring", "ulysses") if mesh.cp > 1 else ("ring",):
            fields = {"microbatches": microbatches, "optim": rp.SGD(lr=0.1), "clip": None, "timeout": 30.0}
            fields |= {"data": data, "micro_batch_size": 2, "context": context, "device": "cpu"}
            run = rp.Run(model=spec, mesh=mesh, **fields | settings)
            if not (now := rp.faults(run)):
                return run
            faults += now
        self.found.refused[name] = "; ".join(faults)
        return None

    def _compare(self, name, run):
        with closing(TeamGeneration(run)) as generation:
            if run.mesh.cp == 1:  # others can't score
                made = scores(lambda: generation.loaded, lambda call: call(), self.texts, 2)
                for number, (one, theirs, exact) in enumerate(
                    zip(made, self.theirs.logs, self.exact.logs, strict=True)
                ):
                    self._logs(name, f"text {number}", torch.tensor(one.logs).double(), theirs.double(), exact)
            self._exported(name, generation.team)
            results = generation.team.step(0)
            loss = torch.tensor([mean_loss(*losses_of(results))]).double()
            self._logs(name, "loss", loss, *(torch.tensor([one.loss]) for one in (self.theirs, self.exact)))
            homes = generation.loaded.skeleton.originals
            self._gradients(
                name, {homes.get(weight, weight): one for weight, one in generation.team.gradients().items()}
            )

    def _logs(self, name, what, ours, theirs, exact):
        off = (ours - theirs).abs().max().item()
        self.found.logs = max(self.found.logs, off)
        rounding = (theirs - exact).abs().max().item()
        if not (off <= LOGS or (ours - exact).abs().max().item() <= TIMES * rounding):
            self._note(name, f"{what}: log-probabilities off by {off:.2g} (transformers' from float64 {rounding:.2g})")

    def _gradients(self, name, ours):
        largest = max(one.abs().max().item() for one in self.exact.gradients.values())
        conversions, seen = converted(self.tiny.kind, ours), set()
        for weight, gradient in ours.items():
            one = conversions[weight]
            seen.add(one.theirs)
            theirs, exact = (self._part(of.gradients[one.theirs], one) for of in (self.theirs, self.exact))
            mine = torch.zeros_like(exact) if gradient is None else gradient.double()
            theirs, exact = theirs[: len(mine)], exact[: len(mine)]  # positions beyond those of the run have none
            off, rounding = ((it.double() - exact.double()).abs().max().item() for it in (mine, theirs))
            size = exact.abs().max().item()
            if size > 1e-6 * largest:
                self.found.gradient = max(self.found.gradient, off / size)
            if not off <= max(GRADIENT * size, TIMES * rounding, ROUNDING * largest):
                self._note(name, f"gradient of {weight} off by {off:.2g} of {size:.2g} (transformers' {rounding:.2g})")
        if missing := sorted(self.exact.gradients.keys() - seen):
            self._note(name, f"no gradients of {missing}")

    def _part(self, tensor, conversion):
        whole = tensor.t() if conversion.transposed else tensor
        return whole.chunk(conversion.parts)[conversion.part]

    def _exported(self, name, team):
        """Compare what is exported."""
        import transformers

        home = self.home / name.replace(" ", "")
        out = export(checkpoint_of(team, home / "checkpoints"), home / "to", shard=3000)
        ours, theirs = tensors_of(out), tensors_of(self.folder)
        if ours.keys() != theirs.keys():
            self._note(name, f"exported tensors differ: {sorted(ours.keys() ^ theirs.keys())}")
        for key in sorted(ours.keys() & theirs.keys()):
            if ours[key].dtype != theirs[key].dtype or not torch.equal(ours[key], theirs[key]):
                self._note(name, f"exported {key} has other bits")
        before, after = (meaning(transformers.AutoConfig.from_pretrained(one)) for one in (self.folder, out))
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                self._note(name, f"config: {key} was {before.get(key)!r}, exported {after.get(key)!r}")
        again = transformers.AutoModelForCausalLM.from_pretrained(
            out, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
        ).eval()
        ids = self.batch(0)[0]
        with torch.no_grad():
            off = (again(ids).logits - copy.deepcopy(self.model)(ids).logits).abs().max().item()
        if not off <= 1e-6:
            self._note(name, f"the export's logits differ in transformers by {off:.2g}")

    def _note(self, name, line):
        self.found.wrong.append(f"{name}: {line}")


def meaning(config):
    """What a config says, in one spelling: what has no effect is left out, and what is implied is said."""
    plain = config.to_dict()
    for name in ("transformers_version", "_name_or_path", "architectures"):
        plain.pop(name, None)
    if "n_embd" in plain:
        plain["n_inner"] = plain["n_inner"] or 4 * plain["n_embd"]
    if "num_attention_heads" in plain:
        width = plain["hidden_size"] // plain["num_attention_heads"]
        plain["head_dim"] = plain.get("head_dim") or width
        plain["num_key_value_heads"] = plain.get("num_key_value_heads") or plain["num_attention_heads"]
    for name in ("activation_function", "hidden_act", "hidden_activation"):
        if name in plain:
            plain[name] = _SAME.get(plain[name], plain[name])
    if "layer_types" in plain or not plain.get("use_sliding_window", True):
        plain.pop("max_window_layers", None)
    if "sliding_attention" not in plain.get("layer_types", ["sliding_attention"]):
        for name in ("sliding_window", "use_sliding_window"):
            plain.pop(name, None)
    rope = plain.get("rope_parameters") or {}
    if rope.get("rope_type") == "yarn":
        trained = rope["original_max_position_embeddings"]
        implied = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None}
        factor = rope.get("factor") or plain["max_position_embeddings"] / trained
        plain["rope_parameters"] = implied | rope | {"factor": factor}
    return plain


def _exact_norms(model, kind):
    """The model, in which norms of a Gemma have values of bfloat16, as published ones do: 1 and they are exact."""
    if kind.startswith("gemma"):
        with torch.no_grad():
            for name, one in model.named_parameters():
                if "norm" in name:
                    one.copy_(one.bfloat16())
    return model
