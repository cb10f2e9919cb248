"""Published steps on A100s and H100s, against which the planner's model of time is held."""

from __future__ import annotations

from typing import NamedTuple

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.planner.hardware.cluster import Cluster
from raypar.planner.hardware.data_sheets import DEVICES, LINKS
from raypar.planner.timing.messages import LADDER, Software
from raypar.planner.timing.step import StepModel

#: Megatron-LM of 2021.
MEGATRON = Software(scatters=True, hides="alone", slices_loss=False)
#: That of Llama 3, of which no loss from slices is published.
LLAMA_3 = Software(slices_loss=False)


class Row(NamedTuple):
    """A row of a table: the model, the layout and what was measured."""

    billions: float
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    measured: float  # TFLOP/s a GPU, or seconds
    samples: int  # of a microbatch
    chunks: int = 1


# Narayanan et al. 2021, table 1. Its samples of a microbatch and stages a rank are those of the script with which it
# was made: Megatron-LM, examples/sc21/run_table_1.sh.
NARAYANAN = (
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 16),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 16),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 16),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 8),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 4),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
    Row(1008, 160, 25600, 128, 8, 64, 3072, 3072, 163, 1),
)
# Korthikanti et al. 2022, tables 3 and 5: seconds of a step with sequence parallelism and selective recomputation.
KORTHIKANTI = (
    Row(22, 64, 6144, 48, 8, 1, 8, 4, 1.10, 4),
    Row(175, 96, 12288, 96, 8, 8, 64, 64, 13.75, 1, 3),
    Row(530, 128, 20480, 105, 8, 35, 280, 280, 37.83, 1, 3),
    Row(1000, 160, 25600, 128, 8, 64, 512, 512, 71.49, 1),
)
FULL_SECONDS = (1.42, 18.13, 49.05, 94.42)  # the same models, with all layers recomputed and no sequence parallelism


def model_of(row: Row) -> GPT:
    """Return the model of a row, as Megatron-LM computed it then: dropout, scores in memory, tied embeddings."""
    sizes = {"layers": row.layers, "hidden": row.hidden, "heads": row.heads}
    return GPT(**sizes, seq=2048, vocab=51200, dropout=0.1, tied=True, attention="materialised")


def run_of(row: Row, *, selective: bool = False) -> Run:
    """Return the run of a row."""
    dp = row.gpus // row.tp // row.pp
    return Run(
        model=model_of(row),
        mesh=Mesh(pp=row.pp, dp=dp, tp=row.tp),
        schedule="interleaved" if row.chunks > 1 else "1f1b",
        chunks=row.chunks if row.chunks > 1 else None,
        microbatches=row.batch // dp // row.samples,
        micro_batch_size=row.samples,
        recompute="selective" if selective else ("full",) * row.layers,
        sequence_parallel=selective,
        zero=0,
        precision=Precision(compute="fp16"),
        bucket_mb=512,
    )


def cluster_of(row: Row) -> Cluster:
    """Return the machines of a row: DGX A100s with 8 adapters for InfiniBand of 200 Gb/s."""
    return Cluster(DEVICES["a100"], row.gpus // 8, 8, LINKS["nvlink3"], LINKS["ib-hdr"], 8)


def paper_of(row: Row, *, selective: bool = False) -> StepModel:
    """Return the run of a row on paper."""
    run = run_of(row, selective=selective)
    return StepModel(run, model_of(row), cluster_of(row), LADDER, MEGATRON)


class LlamaRow(NamedTuple):
    """A row of Llama 405B: replicas, samples of each in a step, and the TFLOP/s of a GPU."""

    dp: int
    batch: int
    measured: float


# Llama Team 2024 (arXiv 2407.21783), table 4, with 8,192 tokens: 16 pipeline ranks of 8 tensor ranks each.
LLAMA = (LlamaRow(64, 32, 430), LlamaRow(128, 16, 400))


def paper_of_llama(row: LlamaRow) -> StepModel:
    """Return a row's run on paper.

    The model has 128 layers, one for each of 16 x 8 stages; the real one has 126, so that the first and the last stage
    have none beside the embedding and the head.
    """
    model = Llama(layers=128, hidden=16384, heads=128, kv_heads=8, seq=8192, vocab=128256, ffn=53248)
    run = Run(
        model=model,
        mesh=Mesh(pp=16, dp=row.dp, tp=8),
        schedule="interleaved",
        chunks=8,
        microbatches=row.batch,
        micro_batch_size=1,
        sequence_parallel=True,
        zero=1,
        precision=Precision(compute="bf16"),
        bucket_mb=512,
    )
    cluster = Cluster(DEVICES["h100"], 16 * row.dp, 8, LINKS["nvlink4"], LINKS["ethernet-400"], 8)
    return StepModel(run, model, cluster, LADDER, LLAMA_3)
