/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A user's first contact with headrace.h, in C99, C11 and C++17: nothing is included before it, it may be included
 * twice, its set-up macros work, and what it declares is found in the shared library.
 */
#define HR_EXPERIMENTAL
#include "headrace.h"

#ifdef __cplusplus
#include <cstring>
#else
#include <string.h>
#endif

#define TEXT_OF(number) #number
#define TEXT(number)    TEXT_OF(number)
#define HEADER_VERSION  TEXT(HR_VERSION_MAJOR) "." TEXT(HR_VERSION_MINOR) "." TEXT(HR_VERSION_PATCH)

int main(void)
{
	struct hr_model_opts model = HR_MODEL_OPTS_INIT;
	struct hr_tensor tensor = HR_TENSOR_INIT;
	struct hr_shard shard = HR_SHARD_INIT;
	struct hr_device_info info = HR_DEVICE_INFO_INIT;
	struct hr_loader_opts loader = HR_LOADER_OPTS_INIT;
	struct hr_job_opts job = HR_JOB_OPTS_INIT;
	struct hr_map_opts map = HR_MAP_OPTS_INIT;
	struct hr_feed_opts feed = HR_FEED_OPTS_INIT;
	struct hr_cache_opts cache = HR_CACHE_OPTS_INIT;
	struct hr_cache_get_opts get = HR_CACHE_GET_OPTS_INIT;
	struct hr_cache_stats cached = HR_CACHE_STATS_INIT;
	struct hr_stats stats = HR_STATS_INIT;
	struct hr_plan_info plan = HR_PLAN_INFO_INIT;
	struct hr_ceiling ceiling = HR_CEILING_INIT;
	hr_device *device = NULL;

	if (model.size + tensor.size + shard.size + loader.size + job.size + map.size + feed.size + stats.size +
		    plan.size + ceiling.size + cache.size + get.size + cached.size ==
	    0)
		return 1;
	if (hr_device_open("cpu", &device) || hr_device_info(device, &info) || hr_device_close(device))
		return 2;
	if (strcmp(info.spec, "cpu") != 0 || strcmp(hr_error_name(HR_E_OPTS), "HR_E_OPTS") != 0)
		return 3;
	return strcmp(hr_version(), HEADER_VERSION) != 0 ? 4 : 0;
}
