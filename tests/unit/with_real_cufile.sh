#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# with_real_cufile.sh FAKES PROGRAM ARGS...: runs a test over the real libcufile and the look-alike driver in FAKES. HR_CUFILE names the
# folder that libcufile.so.0 is in; tools/check fetches one. Over the real driver on a GPU machine: FAKES is "".
fakes=$1
shift
if [ ! -e "${HR_CUFILE:-/nowhere}/libcufile.so.0" ]; then
	echo "1..0 # SKIP HR_CUFILE does not name a folder with libcufile.so.0"
	exit 0
fi
LD_LIBRARY_PATH=$HR_CUFILE${fakes:+:$fakes}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Which file systems it takes it decides by udev's database, which a container has not; so it is let take all.
CUFILE_EXPERIMENTAL_FS=1
export LD_LIBRARY_PATH CUFILE_EXPERIMENTAL_FS
exec "$@"
