/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints size of every open struct of headrace.h and place and size of each of its fields; structs.txt holds what it
 * must be. A difference is a decision: fields may be appended (then structs.txt gains lines), never moved, resized or
 * taken away. symtest.py finds structs and fields that are missing here.
 */
#define HR_EXPERIMENTAL
#include "headrace.h"

#include <stdio.h>

#define S(type) printf("%s %zu\n", #type, sizeof(struct type))
#define F(type, field)                                                                                                 \
	printf("  %s.%s %zu %zu\n", #type, #field, offsetof(struct type, field), sizeof(((struct type *)0)->field))

int main(void)
{
	S(hr_error);
	F(hr_error, code);
	F(hr_error, system);
	F(hr_error, offset);
	F(hr_error, stage);
	F(hr_error, path);
	F(hr_error, tensor);
	F(hr_error, message);
	S(hr_model_opts);
	F(hr_model_opts, size);
	F(hr_model_opts, flags);
	S(hr_tensor);
	F(hr_tensor, size);
	F(hr_tensor, name);
	F(hr_tensor, name_len);
	F(hr_tensor, dims);
	F(hr_tensor, index);
	F(hr_tensor, bytes);
	F(hr_tensor, offset);
	F(hr_tensor, shard);
	F(hr_tensor, dtype);
	F(hr_tensor, rank);
	F(hr_tensor, flags);
	S(hr_shard);
	F(hr_shard, size);
	F(hr_shard, path);
	F(hr_shard, bytes);
	F(hr_shard, data_offset);
	F(hr_shard, n_tensors);
	F(hr_shard, n_metadata);
	S(hr_digest);
	F(hr_digest, sha256);
	S(hr_device_info);
	F(hr_device_info, size);
	F(hr_device_info, spec);
	F(hr_device_info, name);
	F(hr_device_info, total_bytes);
	F(hr_device_info, free_bytes);
	F(hr_device_info, driver);
	F(hr_device_info, flags);
	S(hr_loader_opts);
	F(hr_loader_opts, size);
	F(hr_loader_opts, staging_bytes);
	F(hr_loader_opts, slot_bytes);
	F(hr_loader_opts, engine);
	F(hr_loader_opts, caching);
	F(hr_loader_opts, readers);
	F(hr_loader_opts, alloc);
	F(hr_loader_opts, release);
	F(hr_loader_opts, alloc_ctx);
	F(hr_loader_opts, flags);
	S(hr_read);
	F(hr_read, tensor);
	F(hr_read, offset);
	F(hr_read, length);
	F(hr_read, dst);
	F(hr_read, dst_bytes);
	S(hr_job_opts);
	F(hr_job_opts, size);
	F(hr_job_opts, io_timeout_ms);
	F(hr_job_opts, flags);
	F(hr_job_opts, wait_stream);
	F(hr_job_opts, signal_stream);
	S(hr_map_opts);
	F(hr_map_opts, size);
	F(hr_map_opts, flags);
	S(hr_feed_opts);
	F(hr_feed_opts, size);
	F(hr_feed_opts, tensors);
	F(hr_feed_opts, n_tensors);
	F(hr_feed_opts, flags);
	F(hr_feed_opts, io_timeout_ms);
	F(hr_feed_opts, wait_stream);
	F(hr_feed_opts, signal_stream);
	F(hr_feed_opts, next_timeout_ms);
	S(hr_stats);
	F(hr_stats, size);
	F(hr_stats, total_bytes);
	F(hr_stats, done_bytes);
	F(hr_stats, total_tensors);
	F(hr_stats, read_bytes);
	F(hr_stats, n_chunks);
	F(hr_stats, n_copies);
	F(hr_stats, n_batches);
	F(hr_stats, cached_bytes);
	F(hr_stats, direct_bytes);
	F(hr_stats, elapsed_ns);
	F(hr_stats, first_ns);
	F(hr_stats, storage_wait_ns);
	F(hr_stats, copy_wait_ns);
	F(hr_stats, read_cpu_ns);
	F(hr_stats, staging_bytes);
	F(hr_stats, peak_staging_bytes);
	F(hr_stats, lost_bytes);
	F(hr_stats, peak_buffer_bytes);
	F(hr_stats, n_readers);
	F(hr_stats, n_slots);
	F(hr_stats, note);
	F(hr_stats, verified_bytes);
	S(hr_plan_info);
	F(hr_plan_info, size);
	F(hr_plan_info, payload_bytes);
	F(hr_plan_info, read_bytes);
	F(hr_plan_info, n_chunks);
	F(hr_plan_info, n_pieces);
	F(hr_plan_info, resident_bytes);
	F(hr_plan_info, cached_bytes);
	F(hr_plan_info, direct_bytes);
	F(hr_plan_info, staging_bytes);
	F(hr_plan_info, note);
	S(hr_probe_row);
	F(hr_probe_row, kind);
	F(hr_probe_row, name);
	F(hr_probe_row, usable);
	F(hr_probe_row, reason);
	S(hr_ceiling);
	F(hr_ceiling, size);
	F(hr_ceiling, bytes);
	F(hr_ceiling, ns);
	F(hr_ceiling, cpu_ns);
	return 0;
}
