// Work on policies, in steps: their tenants choose how long they are.
import { named, type Steps } from "../../core/steps.ts";
import { inSteps } from "../../edge/steps.ts";

export function worked<T>(steps: Steps<T>, tenant: string): Promise<T> {
  return inSteps(named("work on a policy", steps), tenant);
}
