//! The allocator: pages from the kernel, given back as soon as they are empty.
//!
//! Small blocks come from single pages cut into equal pieces; what is larger gets a mapping of its
//! own, grown by `mremap`. An idle guest must be small and a burst must leave nothing behind, which
//! counts for more here than the speed of allocation. Single-threaded by design: the guest never
//! makes a thread.

use crate::sys::{call, nr};
use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr::{null_mut, NonNull};

const PAGE: usize = 4096;
/// Piece sizes; a page holds (4096 - 32) / size of them.
const CLASSES: [usize; 13] = [16, 32, 48, 64, 96, 128, 192, 256, 400, 576, 800, 1344, 2032];
/// Empty pages kept, so that a loop of short runs does not map and unmap each time.
const SPARE_PAGES: usize = 4;

/// Sits at the start of each page of pieces.
#[repr(C)]
struct Page {
    free: *mut Piece,
    next: *mut Page,
    prev: *mut Page,
    used: u16,
    class: u8,
    /// Whether the page is in its class's list (it has a free piece).
    listed: bool,
}

#[repr(C)]
struct Piece {
    next: *mut Piece,
}

const HEADER: usize = core::mem::size_of::<Page>();

struct State {
    /// Per class: pages that have a free piece.
    open: [*mut Page; CLASSES.len()],
    spare: *mut Page,
    spares: usize,
}

/// The global allocator of the guest.
pub struct PageAlloc(UnsafeCell<State>);

// SAFETY: the guest has one thread.
unsafe impl Sync for PageAlloc {}

impl PageAlloc {
    pub const fn new() -> Self {
        PageAlloc(UnsafeCell::new(State {
            open: [null_mut(); CLASSES.len()],
            spare: null_mut(),
            spares: 0,
        }))
    }
}

impl Default for PageAlloc {
    fn default() -> Self {
        Self::new()
    }
}

fn class_of(layout: Layout) -> Option<usize> {
    if layout.align() > 16 {
        return None;
    }
    CLASSES.iter().position(|size| layout.size() <= *size)
}

fn pages(bytes: usize) -> usize {
    (bytes + PAGE - 1) & !(PAGE - 1)
}

fn map(bytes: usize) -> *mut u8 {
    const READ_WRITE: usize = 3;
    const PRIVATE_ANONYMOUS: usize = 0x22;
    call!(
        nr::MMAP,
        0,
        bytes,
        READ_WRITE,
        PRIVATE_ANONYMOUS,
        -1isize,
        0
    )
    .map_or(null_mut(), |p| p as *mut u8)
}

fn unmap(start: *mut u8, bytes: usize) {
    let _ = call!(nr::MUNMAP, start, bytes);
}

impl State {
    /// A page cut into pieces of `class`, put in front of the class's list.
    fn new_page(&mut self, class: usize) -> Option<NonNull<Page>> {
        let page = if let Some(spare) = NonNull::new(self.spare) {
            // SAFETY: spare pages are mapped and carry a valid `next`.
            self.spare = unsafe { (*spare.as_ptr()).next };
            self.spares -= 1;
            spare
        } else {
            NonNull::new(map(PAGE).cast::<Page>())?
        };
        let size = CLASSES[class];
        let start = page.as_ptr().cast::<u8>();
        let mut free: *mut Piece = null_mut();
        for i in (0..(PAGE - HEADER) / size).rev() {
            // SAFETY: piece i lies wholly within the page, behind its header.
            unsafe {
                let piece = start.add(HEADER + i * size).cast::<Piece>();
                (*piece).next = free;
                free = piece;
            }
        }
        // SAFETY: the page is ours, writable and aligned.
        unsafe {
            page.as_ptr().write(Page {
                free,
                next: null_mut(),
                prev: null_mut(),
                used: 0,
                class: class as u8,
                listed: false,
            });
            self.link(page.as_ptr());
        }
        Some(page)
    }

    /// # Safety
    /// `page` must be a live page that is in no list.
    unsafe fn link(&mut self, page: *mut Page) {
        // SAFETY: by the contract above; list neighbours are live pages.
        unsafe {
            let head = &mut self.open[usize::from((*page).class)];
            (*page).next = *head;
            (*page).prev = null_mut();
            (*page).listed = true;
            if !(*head).is_null() {
                (**head).prev = page;
            }
            *head = page;
        }
    }

    /// # Safety
    /// `page` must be a live page in its class's list.
    unsafe fn unlink(&mut self, page: *mut Page) {
        // SAFETY: by the contract above; list neighbours are live pages.
        unsafe {
            let Page {
                next, prev, class, ..
            } = *page;
            if prev.is_null() {
                self.open[usize::from(class)] = next;
            } else {
                (*prev).next = next;
            }
            if !next.is_null() {
                (*next).prev = prev;
            }
            (*page).listed = false;
        }
    }

    fn take(&mut self, class: usize) -> *mut u8 {
        let page = match NonNull::new(self.open[class]).or_else(|| self.new_page(class)) {
            Some(page) => page.as_ptr(),
            None => return null_mut(),
        };
        // SAFETY: a listed page has a free piece.
        unsafe {
            let piece = (*page).free;
            (*page).free = (*piece).next;
            (*page).used += 1;
            if (*page).free.is_null() {
                self.unlink(page);
            }
            piece.cast()
        }
    }

    /// # Safety
    /// `block` must come from `take` and be given back once.
    unsafe fn give(&mut self, block: *mut u8) {
        let page = (block as usize & !(PAGE - 1)) as *mut Page;
        let piece = block.cast::<Piece>();
        // SAFETY: pieces lie in a page that starts with its header.
        unsafe {
            (*piece).next = (*page).free;
            (*page).free = piece;
            (*page).used -= 1;
            if !(*page).listed {
                self.link(page);
            }
            let lonely = (*page).next.is_null() && (*page).prev.is_null();
            if (*page).used > 0 || lonely {
                return;
            }
            self.unlink(page);
            if self.spares < SPARE_PAGES {
                (*page).next = self.spare;
                self.spare = page;
                self.spares += 1;
            } else {
                unmap(page.cast(), PAGE);
            }
        }
    }
}

// SAFETY: blocks are disjoint, large enough and aligned to 16 (pieces) or 4096 (mappings).
unsafe impl GlobalAlloc for PageAlloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: one thread, and no reference to the state outlives a call.
        let state = unsafe { &mut *self.0.get() };
        match class_of(layout) {
            Some(class) => state.take(class),
            None if layout.align() <= PAGE => map(pages(layout.size())),
            None => null_mut(),
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`; the caller gives back what it got with this layout.
        unsafe {
            match class_of(layout) {
                Some(_) => (*self.0.get()).give(block),
                None => unmap(block, pages(layout.size())),
            }
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller keeps `size` valid for this alignment.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        match (class_of(layout), class_of(wanted)) {
            (Some(a), Some(b)) if a == b => return block,
            (None, None) => {
                let (old, new) = (pages(layout.size()), pages(size));
                if old == new {
                    return block;
                }
                const MAYMOVE: usize = 1;
                return call!(nr::MREMAP, block, old, new, MAYMOVE)
                    .map_or(null_mut(), |p| p as *mut u8);
            }
            _ => {}
        }
        // SAFETY: both blocks are live and disjoint.
        unsafe {
            let fresh = self.alloc(wanted);
            if !fresh.is_null() {
                core::ptr::copy_nonoverlapping(block, fresh, layout.size().min(size));
                self.dealloc(block, layout);
            }
            fresh
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_disjoint_and_survive_growth() {
        let heap = PageAlloc::new();
        let mut seed = 7u32;
        let mut live: Vec<(*mut u8, Layout, u8)> = Vec::new();
        for round in 0..60_000u32 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let pick = (seed >> 8) as usize;
            if live.len() > 300 || (pick % 3 == 0 && !live.is_empty()) {
                let (p, layout, tag) = live.swap_remove(pick % live.len());
                // SAFETY: p is live with this layout.
                unsafe {
                    assert!(
                        (0..layout.size()).all(|i| *p.add(i) == tag),
                        "block overwritten"
                    );
                    heap.dealloc(p, layout);
                }
                continue;
            }
            let size = 1 + pick % if round % 50 == 0 { 40_000 } else { 2100 };
            let layout = Layout::from_size_align(size, 8).unwrap();
            let tag = (pick >> 3) as u8;
            // SAFETY: sizes are within the blocks that the heap returned.
            unsafe {
                let p = heap.alloc(layout);
                p.write_bytes(tag, size);
                let bigger = Layout::from_size_align(size * 2, 8).unwrap();
                let p = heap.realloc(p, layout, size * 2);
                assert!((0..size).all(|i| *p.add(i) == tag));
                assert_eq!(p as usize % 16, 0);
                p.write_bytes(tag, size * 2);
                live.push((p, bigger, tag));
            }
        }
        for (p, layout, _) in live {
            // SAFETY: still live.
            unsafe { heap.dealloc(p, layout) };
        }
        // SAFETY: no other use of the heap at this point.
        let state = unsafe { &*heap.0.get() };
        assert!(state.spares <= SPARE_PAGES);
        for head in state.open {
            // SAFETY: listed pages are live.
            assert!(head.is_null() || unsafe { (*head).used == 0 && (*head).next.is_null() });
        }
    }
}
