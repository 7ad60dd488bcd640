// How long one step is of work that is done in steps. Its cost is counted and not timed, so the same work always takes
// the same steps.

/** Adds to the work of the current step, and returns whether the step should end. */
export type Pace = (work: number) => boolean;

/** The work of one step. A unit is the cost of looking at a byte: a nanosecond or two. */
const STEP_WORK = 262_144;

export function createPace(most: number = STEP_WORK): Pace {
  let done = 0;
  return (work) => {
    done += work;
    if (done < most) return false;
    done = 0;
    return true;
  };
}
