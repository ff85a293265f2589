#!/usr/bin/env bash
# One node of a run on several, or a single node that looks after itself. Start it on every node:
#
#   NODE_RANK=0 NUM_NODES=2 PROCESSES_PER_NODE=8 MAIN_HOST=node-a launch/node.sh accelerate_configs/nodes_fsdp2.yaml CONFIG.yaml [--section.field=value ...]
#
# What it does beside `accelerate launch`:
#   - a process that fails is restarted with all others, MAX_RESTARTS times per launch (torchrun's elastic agents)
#   - a launcher that is gone is started again, MAX_LAUNCHES times; the nodes wait for one another
#   - every rank writes a log of its own: LOG_DIR/nodeN/launchK/*/attempt_A/LOCAL_RANK/{stdout,stderr}.log
#   - SIGTERM, SIGUSR1 and SIGINT reach the training processes, which write a checkpoint and end
#   - the exit status tells whether to start it again: 0 finished; 75, 138 (SIGUSR1) and 143 (SIGTERM) stopped early with
#     a checkpoint; 2 an error that a person has to mend; 1 gave up
#
# Settings are environment variables, with their defaults:
NODE_RANK=${NODE_RANK:-0}                    # this node, from 0 on
NUM_NODES=${NUM_NODES:-1}
PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-8}  # one per GPU
MAIN_HOST=${MAIN_HOST:-127.0.0.1}            # name or address of node 0, as all nodes reach it
MAIN_PORT=${MAIN_PORT:-29500}                # free on node 0
RDZV_BACKEND=${RDZV_BACKEND:-c10d}           # c10d notices nodes that go and come; static keeps ranks in the order of NODE_RANK
JOIN_SECONDS=${JOIN_SECONDS:-1800}           # how long a node waits for the others
MAX_RESTARTS=${MAX_RESTARTS:-3}
MAX_LAUNCHES=${MAX_LAUNCHES:-10}
RETRY_SECONDS=${RETRY_SECONDS:-10}           # between two launches; what is left of the one before ends meanwhile
LOG_DIR=${LOG_DIR:-logs}
PYTHON=${PYTHON:-python}

set -u
if [ $# -lt 2 ]; then
  sed -n '2,/^# Settings/p' "$0" >&2
  exit 2
fi
accelerate_config=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$LOG_DIR/node$NODE_RANK"
export OLMO_HF_EXIT_CODE_FILE="$LOG_DIR/node$NODE_RANK/exit_code"
export PYTHONUNBUFFERED=1

# What matters on a GPU machine; each can be set outside.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}  # says what is wrong with the network, and no more
# With a trace buffer, the ranks write down who was in which collective when one of them times out.
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1} TORCH_NCCL_TRACE_BUFFER_SIZE=${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}
# A long first compilation or a large checkpoint is no hang; a rank that really hangs is noticed by its silence.
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=${TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC:-1800}
# 1, which tensor parallelism wants, would keep FSDP from gathering a layer while another one computes.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
# Gathered layers come and go: without it memory is lost in gaps between them.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# The launcher must outlive a request to stop, or it would end the training processes while they save. So it ignores
# SIGTERM and SIGUSR1 (a scheduler sends them to every process it can see), and torchrun is told not to handle SIGTERM.
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT

# A node that comes back asks where the others meet; agents that share one store with the training processes would not
# tell it again. So the first training process opens a store of its own at every restart.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

asked=
trap 'asked=TERM' TERM
trap 'asked=USR1' USR1
trap 'asked=INT' INT

say() { echo "[node $NODE_RANK] $(date '+%Y-%m-%d %H:%M:%S') $*"; }

tell_training() {
  local children
  children=$(cat "/proc/$launcher/task/"*/children 2>/dev/null) || true
  [ -z "$children" ] || kill -s "$asked" $children 2>/dev/null
}

launch() {
  local host=false restarts=$MAX_RESTARTS
  [ "$NODE_RANK" -ne 0 ] || host=true
  local options=(--num_machines "$NUM_NODES" --num_processes $((NUM_NODES * PROCESSES_PER_NODE)))
  options+=(--machine_rank "$NODE_RANK" --main_process_ip "$MAIN_HOST" --main_process_port "$MAIN_PORT")
  if [ "$RDZV_BACKEND" = static ]; then
    restarts=0  # its processes cannot meet a second time; the loop below starts all of them again
  else
    export PET_RDZV_ENDPOINT="$MAIN_HOST:$MAIN_PORT"  # which Accelerate passes on for several nodes only
    options+=(--rdzv_conf "is_host=$host,join_timeout=$JOIN_SECONDS")
  fi
  options+=(--rdzv_backend "$RDZV_BACKEND" --max_restarts "$restarts" --monitor_interval 1 --tee 3 --log_dir "$logs")
  (
    trap '' TERM USR1
    exec "$PYTHON" -m accelerate.commands.launch --config_file "$accelerate_config" "${options[@]}" "$root/train_hf.py" "$@"
  ) &
  launcher=$!
}

for ((number = 1; number <= MAX_LAUNCHES; number++)); do
  logs="$LOG_DIR/node$NODE_RANK/launch$number"
  mkdir -p "$logs"
  rm -f "$OLMO_HF_EXIT_CODE_FILE"
  say "launch $number of at most $MAX_LAUNCHES, logs of the ranks in $logs"
  launch "$@"
  while true; do
    wait "$launcher"  # comes back at once when one of the signals arrives
    status=$?
    kill -0 "$launcher" 2>/dev/null || break
    say "SIG$asked: the training processes are told to save and stop"
    while kill -0 "$launcher" 2>/dev/null; do
      tell_training  # again and again: a process that is still starting does not hear it
      sleep 5 & wait $!
    done
  done
  if [ -s "$OLMO_HF_EXIT_CODE_FILE" ]; then
    code=$(cat "$OLMO_HF_EXIT_CODE_FILE")
    say "ended with $code"
    exit "$code"
  fi
  if [ "$status" -eq 0 ]; then
    say "finished"
    exit 0
  fi
  if [ -n "$asked" ]; then
    say "was told to stop and ended without a last checkpoint (status $status); a new launch goes on from the one before"
    exit 75
  fi
  say "the launcher ended with status $status; next launch in $RETRY_SECONDS s"
  sleep "$RETRY_SECONDS" & wait $!
done
say "gave up after $MAX_LAUNCHES launches; see the logs of the ranks in $LOG_DIR/node$NODE_RANK"
exit 1
