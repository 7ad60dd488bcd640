// The time limit of a wait on the database.
import { withDeadline } from "../concurrency/deadline.ts";
import { unavailable } from "./failures.ts";

/**
 * The outcome of `promise`, unless `ms` pass first: then `onLate` is called and Fault `unavailable` thrown.
 * The outcome of the promise after that is ignored.
 */
export function within<T>(ms: number, promise: Promise<T>, onLate: () => void = () => {}): Promise<T> {
  return withDeadline(ms, promise, () => {
    onLate();
    return unavailable(new Error(`no answer within ${Math.round(Math.max(ms, 0))} ms`));
  });
}
