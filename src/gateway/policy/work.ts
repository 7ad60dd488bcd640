// Work on policies, in steps: their tenants choose how long they are.

import { inSteps } from "../../concurrency/run-steps.ts";
import { named, type Steps } from "../../concurrency/steps.ts";

export function worked<T>(steps: Steps<T>, tenant: string): Promise<T> {
  return inSteps(named("work on a policy", steps), tenant);
}
