"""The script of a job that is a pod: an SSH server of its own, in a home of its own.

A user's jobs share the user's home, and with it whatever lies there by a fixed name: three parties would find each
other's agents. So each job has a folder on its node's own disk for a home, and every login of its server is in there.
A login has the job's environment (its GPUs among it), without what tells a library that ``srun`` has started it.
What a job left that was killed outright is taken away by the next one of the same user on that node.
"""

from __future__ import annotations

import shlex
from typing import Final

FOLDER: Final = "$HOME/.uvcc-slurm"

_SCRIPT: Final = r"""#!/bin/sh
set -eu
umask 077
job=$SLURM_JOB_ID node=${SLURMD_NODENAME:-$(hostname)} real=$HOME
told="%(folder)s/$job"
mkdir -p "$told"
exec 2>"$told/why"
base=

cleared() {
  # what a login has started is known by its home, also where Slurm itself does not follow it
  for try in 1 2 3; do
    for found in $(grep -lzxF "HOME=$1/home" /proc/[0-9]*/environ 2>/dev/null); do
      found=${found#/proc/}
      kill -KILL "${found%%/environ}" 2>/dev/null || :
    done
  done
  rm -rf "$1" || :
}

over() {
  code=$?
  trap '' TERM INT
  [ ! -s "$base/said" ] || tail -n 1 "$base/said" >>"$told/why"
  [ -z "$base" ] || cleared "$base"
  rm -f "$told/address"
  # why it failed is for the console to read
  [ "$code" != 0 ] && [ "$code" != 143 ] && [ -s "$told/why" ] || rm -rf "$told"
}
trap over EXIT
trap 'exit 143' TERM INT

scratch=%(scratch)s
among=${scratch:-${TMPDIR:-/tmp}}
base=$(mktemp -d "$among/uvcc-$job.XXXXXX")
mkdir "$base/home" "$base/tmp"

# a job that was killed outright could not take its folder away, with the keys and shares in it. Whose script lives
# holds the lock, from before the file has its name; what is another node's or user's, or has no lock, is left alone
echo "$node" >"$base/locked"
exec 8<"$base/locked"
! flock -n 8 2>/dev/null || mv "$base/locked" "$base/alive"
for dead in "$among"/uvcc-[0-9]*.??????; do
  [ ! -L "$dead" ] && [ -O "$dead" ] && [ "$(cat "$dead/alive" 2>/dev/null)" = "$node" ] || continue
  (flock -n 9 && cleared "$dead") 9<"$dead/alive" || :
done 8<&- 2>/dev/null &

sshd=$(command -v sshd || echo /usr/sbin/sshd)
[ -x "$sshd" ] || { echo "there is no sshd on $node" >&2; exit 1; }
sftp=
for each in /usr/lib/openssh /usr/libexec/openssh /usr/lib/ssh /usr/libexec /usr/lib/misc; do
  [ ! -x "$each/sftp-server" ] || sftp=$each/sftp-server
done
[ -n "$sftp" ] || { echo "there is no sftp-server on $node" >&2; exit 1; }
[ "$(id -u)" != 0 ] || mkdir -p -m 755 /run/sshd
printf '%%s\n' %(key)s >"$base/authorized_keys"
ssh-keygen -q -t ed25519 -N '' -f "$base/host_key"

for name in $(env | sed -n -e 's/^\(SLURM[A-Z0-9_]*\)=.*/\1/p' -e 's/^\(SBATCH[A-Z0-9_]*\)=.*/\1/p'); do
  unset "$name"
done
HOME=$base/home TMPDIR=$base/tmp PYTHONUSERBASE=${PYTHONUSERBASE:-$real/.local}
export HOME TMPDIR PYTHONUSERBASE
{
  export -p
  printf '%%s\n' 'cd "$HOME"' 'case "${SSH_ORIGINAL_COMMAND-}" in' '"") exec "${SHELL:-/bin/sh}" -l ;;' \
    "internal-sftp) exec $sftp ;;" 'esac' 'exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
} >"$base/enter"
HOME=$real

for try in 1 2 3 4 5 6 7 8 9; do
  # below where systems take the ports of outgoing connections from
  port=$((20000 + (job * 31 + try * 997 + $$) %% 12000))
  printf '%%s\n' "Port $port" "HostKey \"$base/host_key\"" "AuthorizedKeysFile \"$base/authorized_keys\"" \
    'PidFile none' 'StrictModes no' 'PasswordAuthentication no' 'KbdInteractiveAuthentication no' 'UsePAM no' \
    'LogLevel ERROR' 'PermitUserRC no' "ForceCommand exec /bin/sh '$base/enter'" 'Subsystem sftp internal-sftp' \
    >"$base/sshd_config"
  "$sshd" -D -e -f "$base/sshd_config" 2>"$base/said" &
  server=$!
  sleep 1
  # a server that found its port taken for IPv4 serves IPv6 alone, and nobody finds it
  if kill -0 "$server" 2>/dev/null; then
    grep -q 'already in use' "$base/said" || break
    kill "$server"
  fi
  wait "$server" || :
  server=
done
[ -n "$server" ] || exit 1
echo "$(id -un) $node $port" >"$told/address.part"
mv "$told/address.part" "$told/address"
wait "$server"
"""


def script(key: str, scratch: str = "") -> bytes:
    """For ``sbatch``. ``key``: the line of authorized_keys that is let in; ``scratch``: where its home is made."""
    values = {"folder": FOLDER, "key": shlex.quote(key), "scratch": shlex.quote(scratch)}
    return (_SCRIPT % values).encode()
