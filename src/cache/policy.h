/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who leaves a cache: pure decisions, without memory, locks or time. A node stands for what is resident; the clock
 * counts uses. All nodes are in one list by recency: of their last use, or of the hint that brought them in.
 *
 * **lru**: the one used longest ago.
 *
 * **loop**: the one whose next use is furthest away, judged by its uses so far. In this order:
 *   1. overdue ones: unused for more than twice the interval they used to have (the walk has ended), oldest first;
 *   2. ones without a known interval (used once), the newest first: so a first walk keeps its beginning;
 *   3. by last use + interval, the furthest first.
 * The interval is the longer of a group's last two, so that one that is used twice per round is judged by the round.
 * What left is remembered for a while (a bounded table, by number): an interval may span an eviction.
 *
 * Under both, what came in and was not used yet (a hint brought it) is not for other hints, and for gets it is the last
 * resort (the newest first), unless it has waited too long.
 */
#ifndef HR_CACHE_POLICY_H
#define HR_CACHE_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#define HR__POLICY_PATIENCE 64   /* uses that a hint may wait for its own */
#define HR__POLICY_SLACK    16   /* uses beyond twice the interval before a node is overdue */
#define HR__POLICY_WAYS     4    /* memories in one set */
#define HR__POLICY_SETS     2048 /* a power of two */

struct hr__policy_node {
	uint64_t id;
	uint64_t last_use;     /* clock; 0 = never */
	uint64_t intervals[2]; /* the last two, newest first; 0 = not known */
	uint64_t added;        /* clock when it came in */
	bool is_fresh;         /* not used since */
	bool is_held;          /* set by the owner: not for eviction now */
	struct hr__policy_node *older, *newer;
};

/* What is remembered of one that left. */
struct hr__policy_memory {
	uint64_t id; /* 0 = none */
	uint64_t last_use;
	uint64_t intervals[2];
};

struct hr__policy {
	uint32_t kind;  /* HR_POLICY_* */
	uint64_t clock; /* uses so far */
	struct hr__policy_node *oldest, *newest;
	struct hr__policy_memory *memories; /* HR__POLICY_SETS * HR__POLICY_WAYS; NULL: nothing is remembered */
};

/* `memories` is zeroed memory for HR__POLICY_SETS * HR__POLICY_WAYS of them, or NULL. */
void hr__policy_start(struct hr__policy *policy, uint32_t kind, struct hr__policy_memory *memories);
/* A node comes in; until its first use it is fresh. `id` is not 0. */
void hr__policy_add(struct hr__policy *policy, struct hr__policy_node *node, uint64_t id);
void hr__policy_use(struct hr__policy *policy, struct hr__policy_node *node);
void hr__policy_remove(struct hr__policy *policy, struct hr__policy_node *node);
/* Whether a node that is not held can be evicted for a hint, or for a get while there are others. */
bool hr__policy_may_leave(const struct hr__policy *policy, const struct hr__policy_node *node);
/* Whom to evict for a get or for a hint; NULL: nobody. */
struct hr__policy_node *hr__policy_victim(const struct hr__policy *policy, bool for_hint);

#endif
