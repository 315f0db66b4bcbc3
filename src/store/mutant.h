/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Seeded bugs, in test builds only: each is a mistake that a store must not make, and the crash tests must find every
 * one of them. So it is shown that those tests can fail. In a normal build HR__MUTANT() is the constant 0.
 */
#ifndef HR_STORE_MUTANT_H
#define HR_STORE_MUTANT_H

#define HR__MUTANT_NO_FLUSH_BEFORE_ROOT 1u  /* the root is written while objects and manifest are still under way */
#define HR__MUTANT_NO_FLUSH_AFTER_ROOT  2u  /* success is told before the root is durable */
#define HR__MUTANT_BODY_IN_PLACE        4u  /* the new manifest goes where the old one was */
#define HR__MUTANT_ONE_ROOT             8u  /* every commit goes to the same root, one copy of it */
#define HR__MUTANT_REUSE_EARLY          16u /* retired extents are used again one commit too early */
#define HR__MUTANT_IGNORE_LEASES        32u /* and although a reader holds them */

#ifdef HR_TEST
extern unsigned hr__store_mutants;
#define HR__MUTANT(which) (hr__store_mutants & (which))
#else
#define HR__MUTANT(which) 0u
#endif

#endif
