"""What ``raypar --help`` prints: all commands, with examples and the exit codes."""

from __future__ import annotations

HELP = """\
usage: raypar COMMAND [...]

Train PyTorch models in parallel with Ray actors.

with actors:
  raypar train [RECIPE|FILE.toml] [flags]       train; recipes: gpt-tiny, gpt-small (default), gpt-124m,
                                                llama-tiny, llama-small, moe-tiny, moe-small
  raypar sft EXAMPLES --model FOLDER [flags]    fine-tune a model of Hugging Face; flags are those of train
  raypar step [RECIPE|FILE.toml] [flags]        a Python REPL in which you take a step action by action (gpt-tiny)
  raypar verify [RECIPE|FILE.toml|RUN] [flags]  compare a few steps with one plain process, bit by bit
  raypar generate RUN|FOLDER "PROMPT" ...       go on with prompts; FOLDER: a checkpoint, or one of Hugging Face
  raypar chat RUN|FOLDER                        answer in the terminal, token by token
  raypar eval RUN|FOLDER [DATA]                 loss, perplexity and bits per byte on validation data, or on a file
  raypar recipes                                list the recipes with their sizes
  raypar doctor [--json] [--sweep]              what is wrong with this machine or the cluster at RAY_ADDRESS
  raypar calibrate [--out FILE] [--seconds N]   measure this machine or cluster, for predictions in seconds

without actors, in no time:
  raypar plan [RECIPE|FILE.toml] [flags]        memory by kind and bytes sent, at every level of ZeRO; with --gpus N
                                                the best layouts on a cluster on paper
  raypar draw SCHEDULE|FILE.csv [flags]         draw a schedule: text, SVG, CSV, Chrome trace
  raypar check SCHEDULE|FILE.csv [flags]        prove that a schedule can run
  raypar simulate SCHEDULE|FILE.csv [flags]     how long a schedule takes, and how much of it is bubble
  raypar gallery [-o schedules.html]            all schedules side by side: what each takes and holds
  raypar compare A B [C ...] [-o both.html]     some of them, or of yours: also versions, messages, where rows differ
  SCHEDULE may be code of yours: my.py:function or package.module:function

examples, as a run learns them:
  raypar data show EXAMPLES|RUN [flags]         print sequences, with what is learned in colour

checkpoints, which raypar train --folder FOLDER writes:
  raypar ckpt ls FOLDER                         list them
  raypar ckpt verify PATH                       read every byte of one, or of all in a folder
  raypar ckpt export RUN FOLDER                 write one as a folder of Hugging Face

run folders, which raypar train --folder RUN writes:
  raypar report RUN [-o report.html]            one HTML file: losses, speed, times, memory, messages
  raypar report RUN RUN ...                     one HTML file that compares runs
  raypar report RUN --live [--port N]           the same, served on 127.0.0.1 and refreshed while training goes on
  raypar trace RUN [-o trace.json]              the latest measured step, for ui.perfetto.dev

  raypar COMMAND --help                         the flags of a command
  raypar --version

examples:
  raypar train gpt-tiny --mesh.pp 4 --schedule interleaved --folder runs/first
  raypar train gpt-tiny --mesh.dp 2 --data-parallel parameter_server --trace step.json
  raypar train --model.layers 12 --data.path 'books/*.txt' --optim.kind sgd --dry-run
  raypar train gpt-small --folder runs/second --save-every 20 --keep-last 3 --track tensorboard
  raypar train --resume runs/second
  raypar step gpt-tiny --schedule gpipe --microbatches 4
  raypar report runs/second
  raypar generate runs/second "def main(" --temperature 0.8
  raypar verify --schedule gpipe
  raypar draw 1f1b --ranks 4 --microbatches 8 --out 1f1b.svg

exit codes:
  0    done
  1    verify found a difference; ckpt found a checkpoint that is not sound; doctor found something wrong
  2    a mistake in flags, file or schedule; each is listed with its fix, and no step was taken (report shows the
       runs that it finds)
  4    the run failed: an actor died, stalled, or raised an error; or its last checkpoint could not be saved
  5    the cluster has no room for the actors, or had none in time: the same command may succeed later
  6    the gradients became infinite or NaN
  130  stopped with Ctrl-C, behind a checkpoint if there is a folder; the actors are gone
  143  ended by SIGTERM, as with Ctrl-C; a second one ends the run at once
"""
