#!/bin/bash
# A Slurm of two nodes on this machine, beside any other: its configuration, munge socket and ports are its own.
# usage: cluster.sh up|down FOLDER   (root; Debian's packages slurm-wlm and munge)
# Every command that is to talk to it needs SLURM_CONF=FOLDER/slurm.conf.
set -euo pipefail
action=${1:?up or down} base=${2:?a scratch folder}
export SLURM_CONF=$base/slurm.conf
host=$(hostname -s)

free_ports() {
  python3 -c '
import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in held))'
}

configure() {
  read -r control first second < <(free_ports)
  cat >"$SLURM_CONF" <<CONF
ClusterName=isobatch
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control
AuthType=auth/munge
AuthInfo=socket=$base/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog=$base/prolog.sh
SlurmUser=root
SlurmctldPidFile=$base/slurmctld.pid
SlurmdPidFile=$base/slurmd.%n.pid
SlurmdSpoolDir=$base/spool.%n
StateSaveLocation=$base/state
SlurmctldLogFile=$base/slurmctld.log
SlurmdLogFile=$base/slurmd.%n.log
SlurmdParameters=config_overrides
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
JobRequeue=1
MailProg=$base/mail
KillWait=20
SlurmdTimeout=10
BatchStartTimeout=30
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$first CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$second CPUs=2 RealMemory=4000
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=grace Nodes=ALL MaxTime=01:00:00 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
CONF
}

up() {
  mkdir -p "$base"/{state,munge}
  chmod 755 "$base" "$base/munge"
  head -c 1024 /dev/urandom >"$base/munge/key"
  chmod 600 "$base/munge/key"
  munged --force --key-file="$base/munge/key" --socket="$base/munge/socket" --pid-file="$base/munge.pid" \
    --log-file="$base/munge.log" --seed-file="$base/munge/seed"
  configure
  printf '#!/bin/sh\necho "$*" >>%q\n' "$base/mails" >"$base/mail"
  printf '#!/bin/sh\ncat "%s/prolog.$SLURMD_NODENAME" 2>/dev/null || true\n' "$base" >"$base/prolog.sh"
  chmod 755 "$base/mail" "$base/prolog.sh"
  slurmctld
  slurmd -N n1
  slurmd -N n2
  for _ in $(seq 60); do
    [ "$(sinfo -h -N -p debug -o %t 2>/dev/null | grep -c idle)" = 2 ] && return
    sleep 0.5
  done
  sinfo
  return 1
}

down() {
  scancel --full --signal=KILL --user=root 2>/dev/null || true
  for _ in $(seq 60); do # a node's daemon outlives its own end where a job still runs there
    [ -z "$(squeue -h 2>/dev/null)" ] && break
    sleep 0.5
  done
  for file in "$base"/slurmd.n?.pid "$base"/slurmctld.pid "$base"/munge.pid; do
    [ -s "$file" ] && kill "$(cat "$file")" 2>/dev/null || true
  done
}

$action
