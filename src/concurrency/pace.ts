// How long the steps of work are that comes in steps. What a step costs is counted, not timed: the same work always
// takes the same steps.

/** Adds to the work of the step that is under way, and gives whether that is enough for one. */
export type Pace = (work: number) => boolean;

/** Of one step. A unit is what it takes to look at a byte: a nanosecond or two. */
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
