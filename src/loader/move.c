/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves: memory between the device and pinned host memory, for what is evicted and comes back. The drainer sends them
 * (before full slots, so that a job which starts after a move writes after it) and ends them when their fence is done.
 */
#include "loader.h"

int hr__move_start(hr_loader *loader, struct hr__move *move)
{
	int rc = 0;

	pthread_mutex_lock(&loader->lock);
	if (loader->is_closing || loader->is_closed)
		rc = HR_E_CANCELLED;
	move->is_done = rc != 0;
	move->code = rc;
	move->next = NULL;
	if (!rc) {
		*loader->moves_end = move;
		loader->moves_end = &move->next;
		loader->n_moves++;
		if (loader->drainer_waiting)
			pthread_cond_signal(&loader->full);
	}
	pthread_mutex_unlock(&loader->lock);
	return rc;
}

bool hr__move_wait(hr_loader *loader, struct hr__move *move, uint64_t deadline_ns)
{
	bool in_time = true, is_done;

	pthread_mutex_lock(&loader->lock);
	while (!move->is_done && in_time && deadline_ns)
		in_time = hr__os_cond_wait(&loader->idle, &loader->lock, deadline_ns);
	is_done = move->is_done;
	pthread_mutex_unlock(&loader->lock);
	return is_done;
}

void hr__move_end(hr_loader *loader, struct hr__move *move, int code, const struct hr__device_error *error)
{
	move->code = code;
	move->error = *error;
	move->is_done = true;
	loader->n_moves--;
	pthread_cond_broadcast(&loader->idle);
}
