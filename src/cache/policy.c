/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The policies. A victim is searched for by a walk over the list by recency: under lru that ends at the first node that
 * is not held, under loop it looks at all. Both are short against the load that follows.
 */
#include "policy.h"

#include "headrace.h"

#include <stddef.h>

void hr__policy_start(struct hr__policy *policy, uint32_t kind, struct hr__policy_memory *memories)
{
	*policy = (struct hr__policy){.kind = kind, .memories = memories};
}

/* ---- the list ---- */

static void unlink_node(struct hr__policy *policy, struct hr__policy_node *node)
{
	if (node->older)
		node->older->newer = node->newer;
	else
		policy->oldest = node->newer;
	if (node->newer)
		node->newer->older = node->older;
	else
		policy->newest = node->older;
	node->older = node->newer = NULL;
}

static void link_newest(struct hr__policy *policy, struct hr__policy_node *node)
{
	node->older = policy->newest;
	node->newer = NULL;
	if (policy->newest)
		policy->newest->newer = node;
	else
		policy->oldest = node;
	policy->newest = node;
}

/* ---- what is remembered ---- */

static struct hr__policy_memory *set_of(const struct hr__policy *policy, uint64_t id)
{
	return &policy->memories[(id & (HR__POLICY_SETS - 1)) * HR__POLICY_WAYS];
}

static void remember(struct hr__policy *policy, const struct hr__policy_node *node)
{
	struct hr__policy_memory *set, *at;

	if (!policy->memories || !node->last_use)
		return;
	set = at = set_of(policy, node->id);
	for (size_t i = 0; i < HR__POLICY_WAYS; i++) {
		if (set[i].id == node->id) {
			at = &set[i];
			break;
		}
		if (set[i].last_use < at->last_use) /* an empty one has 0 */
			at = &set[i];
	}
	*at = (struct hr__policy_memory){node->id, node->last_use, {node->intervals[0], node->intervals[1]}};
}

static void recall(const struct hr__policy *policy, struct hr__policy_node *node)
{
	const struct hr__policy_memory *set;

	if (!policy->memories)
		return;
	set = set_of(policy, node->id);
	for (size_t i = 0; i < HR__POLICY_WAYS; i++) {
		if (set[i].id != node->id)
			continue;
		node->last_use = set[i].last_use;
		node->intervals[0] = set[i].intervals[0];
		node->intervals[1] = set[i].intervals[1];
	}
}

/* ---- changes ---- */

void hr__policy_add(struct hr__policy *policy, struct hr__policy_node *node, uint64_t id)
{
	*node = (struct hr__policy_node){.id = id, .is_fresh = true, .added = policy->clock};
	recall(policy, node);
	link_newest(policy, node);
}

void hr__policy_use(struct hr__policy *policy, struct hr__policy_node *node)
{
	uint64_t now = ++policy->clock;

	if (node->last_use) {
		node->intervals[1] = node->intervals[0];
		node->intervals[0] = now - node->last_use;
	}
	node->last_use = now;
	node->is_fresh = false;
	if (policy->newest == node)
		return;
	unlink_node(policy, node);
	link_newest(policy, node);
}

void hr__policy_remove(struct hr__policy *policy, struct hr__policy_node *node)
{
	unlink_node(policy, node);
	remember(policy, node);
}

/* ---- decisions ---- */

static uint64_t interval_of(const struct hr__policy_node *node)
{
	return node->intervals[0] > node->intervals[1] ? node->intervals[0] : node->intervals[1];
}

bool hr__policy_may_leave(const struct hr__policy *policy, const struct hr__policy_node *node)
{
	return !node->is_fresh || policy->clock - node->added > HR__POLICY_PATIENCE;
}

static bool is_overdue(const struct hr__policy *policy, const struct hr__policy_node *node)
{
	uint64_t interval = interval_of(node);

	if (node->is_fresh) /* and may leave: it has waited too long */
		return true;
	return interval && policy->clock - node->last_use > 2 * interval + HR__POLICY_SLACK;
}

static struct hr__policy_node *lru_victim(const struct hr__policy *policy)
{
	struct hr__policy_node *node = policy->oldest;

	while (node && (node->is_held || !hr__policy_may_leave(policy, node)))
		node = node->newer;
	return node;
}

/* A higher rank leaves first; among equal ranks, the higher order. */
static void rank_of(const struct hr__policy *policy, const struct hr__policy_node *node, int *rank, uint64_t *order)
{
	uint64_t interval = interval_of(node);

	if (is_overdue(policy, node)) {
		*rank = 3;
		*order = UINT64_MAX - node->last_use;
	} else if (!interval) {
		*rank = 2;
		*order = node->last_use;
	} else {
		*rank = 1;
		*order = node->last_use + interval;
	}
}

static struct hr__policy_node *loop_victim(const struct hr__policy *policy)
{
	struct hr__policy_node *best = NULL;
	uint64_t best_order = 0, order;
	int best_rank = 0, rank;

	for (struct hr__policy_node *node = policy->newest; node; node = node->older) {
		if (node->is_held || !hr__policy_may_leave(policy, node))
			continue;
		rank_of(policy, node, &rank, &order);
		if (rank < best_rank || (rank == best_rank && order <= best_order))
			continue;
		best = node;
		best_rank = rank;
		best_order = order;
	}
	return best;
}

struct hr__policy_node *hr__policy_victim(const struct hr__policy *policy, bool for_hint)
{
	struct hr__policy_node *node = policy->kind == HR_POLICY_LOOP ? loop_victim(policy) : lru_victim(policy);

	if (node || for_hint)
		return node;
	for (node = policy->newest; node && (node->is_held || hr__policy_may_leave(policy, node));)
		node = node->older;
	return node;
}
