# shellcheck shell=bash
for size in 0 -1 1x 64MiBs 99999999999G MiB ''; do
	headrace load two --staging "$size"
	echo "status $?"
done
