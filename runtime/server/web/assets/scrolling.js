/** Keep the newest text in sight, unless the reader has scrolled away from it. */

const NEAR = 48; // pixels from the end that still count as being there

/** Follows the end of an element that scrolls. */
export class Follower {
  /**
   * @param {HTMLElement} scroll
   * @param {HTMLElement} jump button back to the end
   */
  constructor(scroll, jump) {
    this.scroll = scroll;
    this.jump = jump;
    this.following = true;
    scroll.addEventListener("scroll", () => {
      this.following = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;
      jump.hidden = this.following;
    });
    jump.addEventListener("click", () => {
      this.toEnd();
      scroll.focus();
    });
  }

  /** Go to the end if the reader was there. */
  follow() {
    if (this.following) this.toEnd();
  }

  /** Go to the end. */
  toEnd() {
    this.scroll.scrollTop = this.scroll.scrollHeight;
    this.following = true;
    this.jump.hidden = true;
  }
}
