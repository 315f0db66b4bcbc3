#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
#
# All that runs in the guest: the first process, started once per boot with hr.step=STEP on the kernel's command line. It says
# "HR: ..." on the console, which run.py reads, and turns the machine off. /dev/nvme0n1 is for the store; /dev/nvme1n1 holds a
# tar archive with two models, "one" and "two".
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
export PATH=/bin LD_LIBRARY_PATH=/lib LC_ALL=C
store=/dev/nvme0n1
step=$(sed 's/.*hr.step=\([a-z]*\).*/\1/' /proc/cmdline)

end() {
	echo "HR: $1"
	poweroff -f
	sleep 60
}
must() {
	"$@" >/tmp/log 2>&1 && return
	echo "HR: '$*' ended with status $?:"
	cat /tmp/log
	end failed
}
whole() {
	must headrace load "store:$store#$1" --verify --device cpu
	must headrace load "store:$store#$1" --verify --device cpu --engine pread
	must headrace store get "$store" "$1" "/out-$1"
	must diff -r "/models/$1" "/out-$1"
	rm -r "/out-$1"
}

mkdir -p /models /tmp
must tar xf /dev/nvme1n1 -C /models
echo "HR: kernel $(uname -r), logical blocks of $(cat /sys/block/nvme0n1/queue/logical_block_size) bytes, wwid $(cat /sys/block/nvme0n1/wwid)"
case $step in
first)
	must headrace store init "$store" --name emulated
	must headrace store import "$store" /models/one --as one
	must headrace store check "$store" --digests
	whole one
	;;
killed)
	echo "HR: importing"
	headrace store import "$store" /models/two --as two >/tmp/log 2>&1
	echo "HR: imported too early"
	sleep 60
	;;
after)
	must headrace store check "$store" --digests
	whole one
	must headrace store import "$store" /models/two --as two
	must headrace store check "$store" --digests
	whole two
	whole one
	must headrace store rm "$store" two
	must headrace store reclaim "$store"
	must headrace store check "$store" --digests
	whole one
	;;
replaced)
	headrace load "store:$store#one" --device cpu >/tmp/log 2>&1 && end "failed: a store that was copied to another device was opened"
	sed 's/^/HR: /' /tmp/log
	;;
esac
end passed
