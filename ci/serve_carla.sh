#!/usr/bin/env bash
# Start N CARLA simulators and keep them up, for drivelit.rollout.carla.
#   bash ci/serve_carla.sh N [FIRST_PORT] [more flags of CarlaUE4.sh]
# By the environment:
#   CARLA_ROOT (/opt/carla)   where CARLA 0.9.16 was unpacked, with its AdditionalMaps for Bench2Drive's towns
#   CARLA_BIN ($CARLA_ROOT/CarlaUE4.sh)   what is started
#   GPUS (0)                  numbers of the GPUs, taken in turn: GPUS="0 1 2 3"
#   START_S (120)             seconds until a simulator must listen; one that does not is started anew
#   HANG_S (60)               seconds without an answer after which one that did answer is started anew
#   CALL_S (2)                seconds that a call to a port may take
#   PROBE (none)              what else a simulator must do: a command that is given its port and fails if it does not.
#                             An engine that hangs may still take calls; this one it does not answer:
#                             PROBE='python -c "import carla, sys; c = carla.Client(\"127.0.0.1\", int(sys.argv[1]));
#                             c.set_timeout(15); c.get_world()"'   (on one line; CALL_S=20 HANG_S=300: towns load slowly)
#   RESTARTS (20)             of each simulator; then it is given up
#   PORTS_FILE (none)         host:port of each that is to run, one a line
#   LOGS (runs/carla)         one log for each simulator
#
# A simulator takes three ports: the one that is named, and the two after it (streams). Those of the next begin ten
# later. A port that somebody else listens on is never taken: the next free place is, and that is said. Whatever ends
# this script ends the simulators, with all their children. It ends with 1 when all of them were given up.
# Without PROBE an engine that hangs is seen only when its queue of callers is full; the client sees `simulator_lost`.
# CARLA listens on all addresses and lets whoever reaches it load anything: keep its ports behind a firewall.
set -uo pipefail
n=${1:-}
[ -n "$n" ] || { echo "usage: serve_carla.sh N [FIRST_PORT] [FLAGS]" >&2; exit 2; }
first=${2:-2000}
shift $(($# < 2 ? $# : 2))
binary=${CARLA_BIN:-${CARLA_ROOT:-/opt/carla}/CarlaUE4.sh}
start_s=${START_S:-120} hang_s=${HANG_S:-60} restarts=${RESTARTS:-20} logs=${LOGS:-runs/carla}
read -r -a gpus <<<"${GPUS:-0}"
say() { printf '%s %s\n' "$(date +%T)" "$*"; }

[[ $n =~ ^[1-9][0-9]*$ ]] || { echo "serve_carla.sh: N: '$n' is not a number of simulators" >&2; exit 2; }
[[ $first =~ ^[0-9]+$ ]] && ((first >= 1024 && first + 10 * n < 65536)) || {
  echo "serve_carla.sh: FIRST_PORT: '$first' leaves no room for $n simulators between 1024 and 65535" >&2; exit 2; }
[ -x "$binary" ] || {
  echo "serve_carla.sh: no CARLA at $binary: unpack CARLA 0.9.16 and set CARLA_ROOT, or CARLA_BIN" >&2; exit 2; }
mkdir -p "$logs" || exit 2

# An engine that hangs takes no more callers: its queue is full in the end, and a call would wait for minutes.
listens() { timeout "${CALL_S:-2}" bash -c "exec 3<>/dev/tcp/127.0.0.1/$1" 2>/dev/null; }
answers() { listens "$1" && { [ -z "${PROBE:-}" ] || timeout "${CALL_S:-2}" bash -c "$PROBE \"\$@\"" probe "$1" >/dev/null 2>&1; }; }
taken() { listens "$1" || listens $(($1 + 1)) || listens $(($1 + 2)); }
alive() { kill -0 "$1" 2>/dev/null; }
stop() {  # stop PID: it leads a process group of its own
  kill -TERM -- "-$1" 2>/dev/null
  for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 -- "-$1" 2>/dev/null || return 0; sleep 0.2; done
  kill -KILL -- "-$1" 2>/dev/null
}

pids=() ports=() begun=() heard=() starts=()
cleanup() {
  trap - EXIT INT TERM HUP
  for pid in "${pids[@]}"; do [[ $pid =~ ^[1-9] ]] && stop "$pid"; done
  [ -z "${PORTS_FILE:-}" ] || rm -f "$PORTS_FILE"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

launch() {  # launch I [FLAGS]: on its port; a group of its own, so that the engine behind CarlaUE4.sh can be reached
  local i=$1; shift
  if taken "${ports[i]}"; then
    say "simulator $i: somebody else listens on ${ports[i]} to $((ports[i] + 2)) by now; it waits"
    begun[i]=$SECONDS; return
  fi
  setsid "$binary" -carla-rpc-port="${ports[i]}" -RenderOffScreen -nosound \
    -graphicsadapter="${gpus[i % ${#gpus[@]}]}" "$@" >>"$logs/${ports[i]}.log" 2>&1 &
  pids[i]=$! begun[i]=$SECONDS heard[i]=-1 starts[i]=$((starts[i] + 1))
  say "simulator $i: port ${ports[i]}, GPU ${gpus[i % ${#gpus[@]}]}, process ${pids[i]}, start ${starts[i]}"
}

port=$first
for ((i = 0; i < n; i++)); do
  while taken "$port"; do
    say "port $port to $((port + 2)): somebody listens there already; skipped"
    port=$((port + 10))
    ((port + 2 < 65536)) || { echo "serve_carla.sh: no free ports for simulator $i from $first on" >&2; exit 1; }
  done
  ports[i]=$port pids[i]=0 starts[i]=0
  port=$((port + 10))
  launch "$i" "$@"
done
if [ -n "${PORTS_FILE:-}" ]; then printf '127.0.0.1:%s\n' "${ports[@]}" >"$PORTS_FILE"; fi

while :; do
  sleep "${POLL_S:-2}" & wait $!  # a signal ends `wait`, not `sleep`
  left=0
  for ((i = 0; i < n; i++)); do
    [ "${pids[i]}" = gone ] && continue
    left=$((left + 1)) why=""
    if [ "${pids[i]}" = 0 ]; then why="its port was taken"
    elif ! alive "${pids[i]}"; then why="it has died (see $logs/${ports[i]}.log)"
    elif answers "${ports[i]}"; then
      ((heard[i] >= 0)) || say "simulator $i: listens on ${ports[i]} after $((SECONDS - begun[i])) s"
      heard[i]=$SECONDS
    elif ((heard[i] < 0 && SECONDS - begun[i] > start_s)); then why="it did not listen within $start_s s"
    elif ((heard[i] >= 0 && SECONDS - heard[i] > hang_s)); then why="it has not answered for $hang_s s"
    fi
    [ -n "$why" ] || continue
    [ "${pids[i]}" = 0 ] || stop "${pids[i]}"
    pids[i]=0
    if ((starts[i] > restarts)); then
      say "simulator $i: $why; given up after $restarts restarts"
      pids[i]=gone left=$((left - 1))
    else
      say "simulator $i: $why; it is started anew"
      launch "$i" "$@"
    fi
  done
  ((left)) || { echo "serve_carla.sh: no simulator is left" >&2; exit 1; }
done
