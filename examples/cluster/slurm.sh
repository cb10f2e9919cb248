#!/bin/bash
# Train with raypar on Slurm: one Ray over the nodes of the allocation, and one driver on the first of them.
#
#   ray get-auth-token --generate     once: makes the cluster's password, ~/.ray/auth_token, which all nodes see
#   sbatch examples/cluster/slurm.sh gpt-small --mesh.pp 2 --mesh.dp 4
#
# Edit the lines with #SBATCH, and where the virtual environment is. The home folder must be one that all nodes share.
#SBATCH --job-name=raypar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --exclusive
# Add --gpus-per-node=8 for GPUs, and --device cuda to the arguments after the script.
# At the end of --time Slurm ends all processes at once: have --save-every and --folder, and go on with --resume.
# --exclusive is needed: at its end ray symmetric-run stops every Ray of this user on each node.

set -euo pipefail
. "${RAYPAR_VENV:-$HOME/raypar/.venv}/bin/activate"

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
address="$head:6379"

# One task a node: the one on the head starts Ray's head and then the driver, the others start workers and wait.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    env RAY_ADDRESS="$address" ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats --dashboard-host=127.0.0.1 -- raypar train "$@"
